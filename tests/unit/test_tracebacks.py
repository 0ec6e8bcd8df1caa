"""Tracebacks show all of the user's lines, and no others."""

from __future__ import annotations

import traceback
from typing import Any

import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem as sg


@pytest.fixture(params=[False, True], ids=["compiled", "eager"])
def strategy(request: pytest.FixtureRequest) -> Any:
    sg.config.run_eagerly(request.param)
    yield sg.MirroredStrategy(["cpu:0", "cpu:1"])
    sg.config.run_eagerly(False)
    sg.config.filter_tracebacks(True)


def _inner() -> None:
    raise KeyError("mine")


def _step() -> Any:
    _inner()


def _names(call: Any) -> list[str]:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - any error has a traceback
        call()
    entries = traceback.extract_tb(caught.value.__traceback__)
    folder = "src/stratagem/"
    return ["library" if folder in entry.filename else entry.name for entry in entries]


def test_error_of_a_step_shows_the_call_and_the_line_of_the_step(strategy) -> None:
    def call() -> None:
        strategy.run(_step)

    assert _names(call)[1:] == ["call", "_step", "_inner"]
    sg.config.filter_tracebacks(False)
    assert "library" in _names(call)


def test_own_error_shows_the_call_and_how_to_see_the_rest(strategy) -> None:
    def call() -> None:
        strategy.run(_step, args=3)

    assert _names(call)[1:] == ["call"]
    with pytest.raises(ValueError, match="run received args of type int") as caught:
        call()
    assert caught.value.__notes__ == [
        "Frames of stratagem are hidden. sg.config.filter_tracebacks(False) or "
        "STRATAGEM_FILTER_TRACEBACKS=0 shows them."
    ]


def test_functions_and_gradients_inside_a_step_are_filtered(strategy) -> None:
    variable = keras.Variable(1.0)

    def loss() -> Any:
        _inner()

    def step() -> Any:
        return sg.value_and_grad(loss, [variable])

    @sg.function
    def train() -> Any:
        return strategy.run(step)

    names = _names(train)
    assert "library" not in names
    assert [name for name in names if name in ("train", "step", "loss", "_inner")] == [
        "train", "step", "loss", "_inner",
    ]  # fmt: skip


def test_causes_and_notes_stay(strategy) -> None:
    def step() -> Any:
        error = KeyError("second")
        error.add_note("a note")
        try:
            _inner()
        except KeyError as first:
            raise error from first

    with pytest.raises(KeyError, match="second") as caught:
        strategy.run(step)
    assert caught.value.__notes__[0] == "a note"
    assert caught.value.__cause__ is not None
    assert caught.value.__cause__.args == ("mine",)


def test_results_pass(strategy) -> None:
    ones = strategy.run(lambda: jnp.ones(()))
    assert float(strategy.reduce("SUM", ones, axis=None)) == 2
    assert strategy.run.__name__ == "run"


def test_filtering_takes_only_a_bool() -> None:
    with pytest.raises(TypeError, match="enabled='off' is of type str"):
        sg.config.filter_tracebacks("off")  # pyright: ignore[reportArgumentType]


def _failing_loss(y_true: Any, y_pred: Any) -> Any:
    raise KeyError("loss")


def _failing_generator() -> Any:
    raise KeyError("data")
    yield


def test_fit_and_iterators_show_no_frames_of_this_library(strategy) -> None:
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", _failing_loss)
    calls = {
        "_failing_loss": lambda: model.fit(np.ones((4, 3)), np.ones((4, 1)), verbose=0),
        "_failing_generator": lambda: next(iter(strategy.distribute_dataset(_failing_generator()))),
    }
    for name, call in calls.items():
        with pytest.raises(KeyError) as caught:
            call()
        frames = traceback.extract_tb(caught.value.__traceback__)
        assert frames[-1].name == name
        assert not [frame for frame in frames if "src/stratagem" in frame.filename]
