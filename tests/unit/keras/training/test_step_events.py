"""`fit` tells the run's events of its steps, under a strategy and without."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.devices.lockstep import last_program, wait_for_program
from stratagem.keras.training import active_fit as step_events
from stratagem.observe.run_events import process_writer
from stratagem.observe.run_events.reader import read_run
from stratagem.observe.run_events.records import StepEvent
from stratagem.observe.run_events.wait_clock import wait_clock
from tests.parity.comparison import Scope, mirrored
from tests.unit.launch.waiting import until

ROWS = 22
STRATEGIES = {
    "none": contextlib.nullcontext,
    "one device": lambda: sg.OneDeviceStrategy("cpu:0").scope(),
    "mirrored": lambda: mirrored(2).scope(),
}


@pytest.fixture
def lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Gives this process a folder for events; returns what reads the steps in it."""
    monkeypatch.setenv("STRATAGEM_RUN_DIR", str(tmp_path))
    monkeypatch.setattr(process_writer, "_current", process_writer._EventState())
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)

    def read() -> list[tuple[int, int]]:
        """The last step and the number of steps of each line."""
        process_writer.close_events(0)
        (process,) = read_run(tmp_path).processes
        step_events = [event for event in process.events if isinstance(event, StepEvent)]
        return [(event.step, event.num_steps) for event in step_events]

    yield read
    process_writer.close_events(0)


def _model(scope: Scope, *, optimizer: Any = "sgd", steps_per_execution: int = 1) -> Any:
    with scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile(optimizer, "mse", steps_per_execution=steps_per_execution)
    return model


def _fit(model: Any, **arguments: Any) -> None:
    rows = np.ones((ROWS, 3), "float32")
    model.fit(rows, rows[:, :1], batch_size=4, verbose=0, **arguments)


def _whole(lines: list[tuple[int, int]]) -> tuple[int, int]:
    """The last step, and how many were told in all; they have no hole between them."""
    reached = lines[0][0] - lines[0][1]
    for step, num_steps in lines:
        assert step - num_steps == reached
        reached = step
    return reached, sum(num_steps for _, num_steps in lines)


@pytest.mark.parametrize(
    ("strategy", "steps_per_execution"),
    [
        *((strategy, 1) for strategy in STRATEGIES),
        *(pytest.param(strategy, 4, marks=pytest.mark.slow) for strategy in STRATEGIES),
    ],
)
def test_every_step_of_fit_is_reported(
    lines: Callable[[], Any], strategy: str, steps_per_execution: int
) -> None:
    """Of six batches an epoch, the last one short; one call after another goes on."""
    model = _model(STRATEGIES[strategy], steps_per_execution=steps_per_execution)
    _fit(model, epochs=2)
    _fit(model)
    assert _whole(lines()) == (18, 18)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_steps_go_on_where_the_optimizer_stands(lines: Callable[[], Any], strategy: str) -> None:
    """As after a restart, when its state was restored."""
    model = _model(STRATEGIES[strategy])
    model.optimizer.iterations.assign(100)
    _fit(model)
    assert _whole(lines()) == (106, 6)


def test_steps_are_batches_where_gradients_are_accumulated(lines: Callable[[], Any]) -> None:
    optimizer = keras.optimizers.SGD(gradient_accumulation_steps=3)
    model = _model(contextlib.nullcontext, optimizer=optimizer)
    _fit(model, epochs=2)
    _fit(model)
    assert _whole(lines()) == (18, 18)


def test_state_that_a_callback_restores_counts(lines: Callable[[], Any]) -> None:
    model = _model(STRATEGIES["mirrored"])

    class Restore(keras.callbacks.Callback):
        def on_train_begin(self, logs: Any = None) -> None:
            self.model.optimizer.iterations.assign(50)

    _fit(model, callbacks=[Restore()])
    assert _whole(lines()) == (56, 6)


def test_evaluation_and_prediction_are_no_steps(lines: Callable[[], Any]) -> None:
    rows = np.ones((ROWS, 3), "float32")
    model = _model(STRATEGIES["mirrored"])
    _fit(model, validation_data=(rows, rows[:, :1]))
    model.predict(rows, verbose=0)
    assert _whole(lines()) == (6, 6)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_wait_for_data_is_in_the_lines(
    lines: Callable[[], Any], tmp_path: Path, strategy: str
) -> None:
    class Rows(keras.utils.PyDataset):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> Any:
            if threading.current_thread() is not threading.main_thread():
                until(lambda: wait_clock.waits_for_data)  # else it would be beside a step
            time.sleep(0.05)
            return np.ones((4, 3), "float32"), np.ones((4, 1), "float32")

    _model(STRATEGIES[strategy]).fit(Rows(), verbose=0)
    assert _whole(lines()) == (8, 8)
    (process,) = read_run(tmp_path).processes
    found = [event for event in process.events if isinstance(event, StepEvent)]
    assert sum(event.input_s or 0.0 for event in found) > 0.1
    assert all((event.input_s or 0.0) <= event.elapsed_s for event in found)
    assert {event.transfer_s for event in found} == {None}


def test_train_on_batch_is_a_step(lines: Callable[[], Any]) -> None:
    model = _model(contextlib.nullcontext)
    for _ in range(3):
        model.train_on_batch(np.ones((4, 3), "float32"), np.ones((4, 1), "float32"))
    assert _whole(lines()) == (3, 3)


def test_without_a_folder_the_train_function_is_keras_s_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("STRATAGEM_RUN_DIR", raising=False)
    model = _model(contextlib.nullcontext)
    _fit(model)
    assert type(model.train_function).__module__ == "builtins"


class Slow(keras.layers.Layer):
    """Takes the devices a while, and no time of the call that starts it."""

    def call(self, x: Any) -> Any:
        def body(_: int, matrix: Any) -> Any:
            return matrix @ matrix / 300.0

        ones = jnp.ones((300, 300)) * (1 + 0 * x[0, 0])
        return x * jax.lax.fori_loop(0, 40, body, ones)[0, 0]


class Looks(keras.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        pass


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("looks", [True, False])
def test_step_lasts_until_the_devices_are_done(
    strategy: str, looks: bool, monkeypatch: pytest.MonkeyPatch, lines: Callable[[], Any]
) -> None:
    """Those that a callback looks at; else the one before, so that there is always one to do."""
    with STRATEGIES[strategy]():
        model = keras.Sequential([keras.Input((3,)), Slow(), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    _fit(model)  # compiles
    done: list[bool] = []

    def waited(flight: Any) -> None:
        wait_for_program(flight)
        done.append(all(leaf.is_ready() for leaf in jax.tree.leaves(last_program().token)))
        assert jax.tree.leaves(last_program().token)

    monkeypatch.setattr(step_events, "wait_for_program", waited)
    _fit(model, callbacks=[Looks()] if looks else [])
    assert len(done) == 6
    assert done[0]  # the first one of a `fit` is told when it is done
    assert all(done) if looks else not all(done)
