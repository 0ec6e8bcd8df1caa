"""The one observer of training steps."""

from __future__ import annotations

import contextlib

import pytest

from stratagem.observe.profiling.recorder import (
    UNOBSERVED,
    current_observer,
    end_observation,
    observe,
    observed_call,
)


class Counting:
    def __init__(self) -> None:
        self.notes: list[object] = []

    @contextlib.contextmanager
    def step(self, num_steps, results):
        self.notes.append(num_steps)
        yield
        self.notes.append(results())

    def end_if_done(self) -> None:
        self.notes.append("other work")


@pytest.fixture
def observer():
    counting = Counting()
    observe(counting)
    yield counting
    end_observation(counting)


def test_calls_are_steps_or_other_work(observer) -> None:
    with observed_call(4, lambda: "ready", trains=True):
        observer.notes.append("runs")
    with observed_call(1, tuple, trains=False):
        pass
    assert observer.notes == [4, "runs", "ready", "other work"]


def test_second_observer_is_refused(observer) -> None:
    with pytest.raises(RuntimeError, match="while another profile is active"):
        observe(Counting())
    assert current_observer() is observer
    end_observation(Counting())  # not the registered one
    assert current_observer() is observer


def test_nothing_is_observed_without_one() -> None:
    assert current_observer() is None
    assert observed_call(1, tuple, trains=True) is UNOBSERVED
