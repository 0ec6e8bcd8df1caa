"""Train functions of Keras that notify an observer."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest

from stratagem.keras.training.model import observe_steps, restore_steps
from stratagem.observe.profiling.recorder import end_observation, observe


class Observer:
    def __init__(self) -> None:
        self.notes: list[object] = []

    @contextlib.contextmanager
    def step(self, num_steps, results):
        yield
        self.notes.append((num_steps, results()))

    def end_if_done(self) -> None:
        pass


@pytest.fixture
def observer():
    made = Observer()
    observe(made)
    yield made
    end_observation(made)


def _model() -> SimpleNamespace:
    def train(state, iterator):
        return {"loss": sum(iterator)}, (*state, "trained")

    return SimpleNamespace(train_function=train, steps_per_execution=3)


def test_steps_are_noted_with_their_logs(observer) -> None:
    model = _model()
    original = model.train_function
    observe_steps(model)
    observe_steps(model)  # once is enough
    assert model.train_function(("a",), iter([1, 2, 4])) == ({"loss": 7}, ("a", "trained"))
    assert observer.notes == [(3, {"loss": 7})]
    end_observation(observer)
    model.train_function((), iter([]))
    assert len(observer.notes) == 1
    restore_steps(model)
    restore_steps(model)
    assert model.train_function is original


def test_nothing_changes_without_an_observer() -> None:
    model = _model()
    original = model.train_function
    observe_steps(model)
    assert model.train_function is original


def test_model_that_is_not_compiled_yet(observer) -> None:
    model = SimpleNamespace(train_function=None)
    observe_steps(model)
    assert model.train_function is None
