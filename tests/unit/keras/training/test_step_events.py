"""`fit` tells the run's events of its steps, under a strategy and without."""

from __future__ import annotations

import contextlib
import re
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

from stratagem.devices.lockstep import last_program, wait_for_program
from stratagem.keras.training import active_fit as step_events
from stratagem.observe import process_writer
from stratagem.observe.events import StepEvent, read_run
from stratagem.observe.wait_clock import wait_clock
from tests.marks import slow
from tests.parity.comparison import Scope, regression
from tests.unit.keras.replicas import dense_model, two, values_of
from tests.unit.launch.waiting import until

ROWS = 22
STRATEGIES = {"none": contextlib.nullcontext, "mirrored": two}


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
    [*((strategy, 1) for strategy in STRATEGIES), *(slow(strategy, 4) for strategy in STRATEGIES)],
)
def test_every_step_of_fit_is_reported(lines, strategy, steps_per_execution) -> None:
    """Of six batches an epoch, the last one short; one call after another goes on."""
    optimizer = keras.optimizers.SGD(gradient_accumulation_steps=3 if strategy == "none" else None)
    model = dense_model(
        STRATEGIES[strategy], optimizer=optimizer, steps_per_execution=steps_per_execution
    )
    _fit(model, epochs=2)
    _fit(model)
    assert _whole(lines()) == (18, 18)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_steps_go_on_where_the_optimizer_stands(lines: Callable[[], Any], strategy: str) -> None:
    """As after a restart, when its state was restored; evaluation and prediction are no steps."""
    model = dense_model(STRATEGIES[strategy])
    rows = np.ones((ROWS, 3), "float32")

    class Restore(keras.callbacks.Callback):
        def on_train_begin(self, logs: Any = None) -> None:
            self.model.optimizer.iterations.assign(100)

    _fit(model, callbacks=[Restore()], validation_data=(rows, rows[:, :1]))
    model.predict(rows, verbose=0)
    if strategy == "none":
        for _ in range(3):
            model.train_on_batch(rows[:4], rows[:4, :1])
    num_steps = 9 if strategy == "none" else 6
    assert _whole(lines()) == (100 + num_steps, num_steps)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_wait_for_data_is_in_the_lines(lines, tmp_path, strategy) -> None:
    class Rows(keras.utils.PyDataset):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> Any:
            if threading.current_thread() is not threading.main_thread():
                until(lambda: wait_clock.waits_for_data)  # else it would be beside a step
            time.sleep(0.05)
            return np.ones((4, 3), "float32"), np.ones((4, 1), "float32")

    dense_model(STRATEGIES[strategy]).fit(Rows(), verbose=0)
    assert _whole(lines()) == (8, 8)
    (process,) = read_run(tmp_path).processes
    found = [event for event in process.events if isinstance(event, StepEvent)]
    assert sum(event.input_s or 0.0 for event in found) > 0.1
    assert all((event.input_s or 0.0) <= event.elapsed_s for event in found)
    assert {event.transfer_s for event in found} == {None}


class Slow(keras.layers.Layer):
    """Takes the devices a while, and no time of the call that starts it."""

    def call(self, x: Any) -> Any:
        def body(_: int, matrix: Any) -> Any:
            return matrix @ matrix / 300.0

        ones = jnp.ones((300, 300)) * (1 + 0 * x[0, 0])
        return x * jax.lax.fori_loop(0, 40, body, ones)[0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("looks", [True, False])
def test_step_lasts_until_the_devices_are_done(strategy, looks, monkeypatch, lines) -> None:
    """Those that a callback looks at; else the one before, so that there is always one to do."""
    model = dense_model(STRATEGIES[strategy], Slow())
    _fit(model)  # compiles
    done: list[bool] = []

    def waited(flight: Any) -> None:
        wait_for_program(flight)
        done.append(all(leaf.is_ready() for leaf in jax.tree.leaves(last_program().token)))
        assert jax.tree.leaves(last_program().token)

    monkeypatch.setattr(step_events, "wait_for_program", waited)
    _fit(model, callbacks=[_looking("on_train_batch_end", [])] if looks else [])
    assert len(done) == 6
    assert done[0]  # the first one of a `fit` is told when it is done
    assert all(done) if looks else not all(done)


# What callbacks and progress bars are told, and what they may do, while replicas train.

_X, _Y = regression(11)


class _Everything(keras.callbacks.Callback):
    """Notes each call with its logs, and the weights at the end of each training batch."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, Any, dict[str, Any]]] = []

    def _note(self, name: str, index: Any, logs: Any) -> None:
        self.calls.append((name, index, {key: np.array(value) for key, value in logs.items()}))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        weights = {f"weight {i}": value for i, value in enumerate(values_of(self.model.weights))}
        self._note("train batch", batch, logs | weights)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self._note("test batch", batch, logs)

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        self._note("predict batch", batch, logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._note("epoch", epoch, logs)

    def on_test_end(self, logs: Any = None) -> None:
        self._note("test", None, logs)

    def on_train_end(self, logs: Any = None) -> None:
        self._note("train", None, logs)


def _assert_same_calls(one: _Everything, other: _Everything) -> None:
    assert [call[:2] for call in one.calls] == [call[:2] for call in other.calls]
    for (name, index, logs), (_, _, expected) in zip(one.calls, other.calls, strict=True):
        assert logs.keys() == expected.keys()
        for key, value in expected.items():
            message = f"{key} of {name} {index}"
            np.testing.assert_allclose(logs[key], value, rtol=1e-5, atol=1e-6, err_msg=message)


@pytest.mark.parametrize("steps", [3, slow(1)])
def test_callback_of_every_kind_learns_what_one_device_tells(steps) -> None:
    """Of groups of steps, the last one."""

    def recorded(scope: Scope) -> _Everything:
        model = dense_model(scope, metrics=["mae"], steps_per_execution=steps)
        callback = _Everything()
        arguments = {"batch_size": 3, "verbose": 0, "callbacks": [callback]}
        model.fit(_X, _Y, epochs=2, shuffle=False, validation_data=(_X[:5], _Y[:5]), **arguments)
        model.evaluate(_X, _Y, **arguments)
        model.predict(_X, **arguments)
        return callback

    measured = recorded(two)
    _assert_same_calls(measured, recorded(contextlib.nullcontext))
    numbers = [index for name, index, _ in measured.calls if name == "train batch"]
    assert numbers == ([2, 5] if steps == 3 else [0, 1, 2, 3]) * 2


def _looking(hook: str, losses: list[float]) -> Any:
    def look(_: Any, batch: int, logs: Any = None) -> None:
        losses.append(float(logs["loss"]))

    return type("Looks", (keras.callbacks.Callback,), {hook: look})()


_WAYS: dict[str, Any] = {
    "list": lambda losses, model: [_looking("on_train_batch_end", losses)],
    "old_hook": lambda losses, model: [_looking("on_batch_end", losses)],
    "single": lambda losses, model: _looking("on_train_batch_end", losses),
    "callback_list": lambda losses, model: keras.callbacks.CallbackList(
        [_looking("on_train_batch_end", losses)], add_history=True, model=model
    ),
    "function": lambda losses, model: keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: losses.append(float(logs["loss"]))
    ),
}


@pytest.mark.parametrize(
    "way", [way if way in ("list", "function") else slow(way) for way in _WAYS]
)
def test_logs_of_batches_are_computed_for_whoever_looks_at_them(way: str) -> None:
    # Without anybody they are left out, as they cost a little time.
    found: list[list[float]] = []
    for scope in (two, contextlib.nullcontext):
        losses: list[float] = []
        model = dense_model(scope, metrics=["mae"])
        callbacks = _WAYS[way](losses, model)
        model.fit(_X, _Y, batch_size=4, shuffle=False, verbose=0, callbacks=callbacks)
        found.append(losses)
    assert len(found[1]) == 3
    np.testing.assert_allclose(*found, rtol=1e-5)


def test_training_stops_when_the_loss_is_no_number() -> None:
    def num_batches(scope: Scope) -> int:
        targets = _Y.copy()
        targets[5] = np.nan
        counter = _Everything()
        callbacks = [keras.callbacks.TerminateOnNaN(), counter]
        model = dense_model(scope, metrics=["mae"])
        model.fit(_X, targets, batch_size=4, shuffle=False, verbose=0, callbacks=callbacks)
        return len([call for call in counter.calls if call[0] == "train batch"])

    assert num_batches(two) == num_batches(contextlib.nullcontext) == 2


def _numbers(text: str) -> list[str]:
    """What finished progress bars show beside the time: steps and metrics.

    Which bars before the last one are drawn is a matter of time (Keras skips those within 50 ms
    of another, and draws them from other threads), so only what stays on the screen is compared.
    """
    text = re.sub(r"\x1b\[[0-9;]*m|\x08", "", text)
    text = "\n".join(line.rsplit("\r", 1)[-1] for line in text.split("\n"))
    return re.findall(r"\d+/\d+|\w+: -?\d+\.\d+", text)


@pytest.mark.slow
@pytest.mark.parametrize("verbose", [1, 2])
def test_progress_bar_shows_the_numbers_of_one_device(verbose, capsys) -> None:
    shown = []
    for scope in (two, contextlib.nullcontext):
        model = dense_model(scope, metrics=["mae"])
        held_out = (_X[:4], _Y[:4])
        model.fit(_X, _Y, batch_size=4, shuffle=False, verbose=verbose, validation_data=held_out)
        model.evaluate(_X, _Y, batch_size=4, verbose=verbose)
        shown.append(_numbers(capsys.readouterr().out))
    assert shown[0] == shown[1]
    assert "3/3" in shown[0]
    assert any(number.startswith("val_mae: ") for number in shown[0])
