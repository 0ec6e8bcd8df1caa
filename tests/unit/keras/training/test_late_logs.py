"""Logs read on first use: the values are those of their own step, whenever they are read."""

from __future__ import annotations

import contextlib
import copy
import json
import pickle
import time
from collections.abc import Callable
from typing import Any

import jax
import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.keras.training import metric_logs
from stratagem.keras.training.metric_logs import LateLogs
from stratagem.variables.late_reads import LateRead
from tests.parity.comparison import Scope, mirrored, regression
from tests.unit.keras.replicas import values_of

_PLAIN = {"loss": 2.0, "mae": 0.5}
_X, _Y = regression(23)

USES: dict[str, Callable[[Any], Any]] = {
    "item": lambda logs: logs["loss"],
    "get": lambda logs: logs.get("mae"),
    "get without": lambda logs: logs.get("accuracy", 7),
    "items": lambda logs: list(logs.items()),
    "values": lambda logs: list(logs.values()),
    "dict": dict,
    "copy": lambda logs: logs.copy(),
    "copied": copy.copy,
    "deeply": copy.deepcopy,
    "unpacked": lambda logs: {**logs},
    "arguments": lambda logs: dict(**logs),
    "merged": lambda logs: logs | {"loss": 1},
    "merged into": lambda logs: {"lr": 1} | logs,
    "updated": lambda logs: {}.update(logs),
    "equal": lambda logs: (logs == _PLAIN, logs != _PLAIN),
    "repr": repr,
    "text": str,
    "format": "{loss} {mae}".format_map,
    "formatted": lambda logs: "{loss}".format(**logs),
    "json": json.dumps,
    "pickle": lambda logs: pickle.loads(pickle.dumps(logs)),
    "tree": lambda logs: jax.tree.map(lambda leaf: leaf + 1, logs),
    "set": lambda logs: (logs.__setitem__("lr", 3), dict(logs)),
    "set default": lambda logs: (logs.setdefault("loss", 3), dict(logs)),
    "deleted": lambda logs: (logs.__delitem__("loss"), dict(logs)),
    "taken": lambda logs: (logs.pop("loss"), dict(logs)),
    "cleared": lambda logs: (logs.clear(), dict(logs)),
}


def _late(reads: list[int]) -> LateLogs:
    def read() -> dict[str, float]:
        reads.append(1)
        return dict(_PLAIN)

    return LateLogs(_PLAIN, read)


@pytest.mark.parametrize("use", USES)
def test_use_reads_once_and_gives_what_a_dict_gives(use: str) -> None:
    reads: list[int] = []
    logs = _late(reads)
    measured = USES[use](logs)
    assert measured == USES[use](dict(_PLAIN))
    _ = logs.get("loss")
    assert len(reads) == 1


def test_names_are_known_without_a_read() -> None:
    reads: list[int] = []
    logs = _late(reads)
    assert isinstance(logs, dict)
    assert logs
    assert (len(logs), list(logs), list(logs.keys())) == (2, ["loss", "mae"], ["loss", "mae"])
    assert "loss" in logs
    assert "accuracy" not in logs
    assert reads == []


def _one() -> Any:
    return sg.OneDeviceStrategy("cpu:1").scope()


def _two() -> Any:
    return mirrored(2).scope()


class _Custom(keras.Model):
    """A model whose step returns logs of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1, kernel_initializer="ones")

    def call(self, inputs: Any) -> Any:
        return self.dense(inputs)

    def train_step(self, *args: Any) -> Any:
        logs, state = super().train_step(*args)
        return {**logs, "own": logs["loss"] + 1}, state


class _Nested(keras.Sequential):
    """A model with a dict among its logs."""

    def get_metrics_result(self) -> Any:
        return {"all": super().get_metrics_result()}


def _model(scope: Scope, kind: Any = keras.Sequential, steps: int = 1) -> Any:
    with scope():
        dense = keras.layers.Dense(1, kernel_initializer="ones")
        model = kind() if kind is _Custom else kind([keras.Input((3,)), dense])
        optimizer = keras.optimizers.SGD(0.05)
        model.compile(optimizer, "mse", metrics=["mae"], steps_per_execution=steps)
    return model


def _fit(model: Any, *callbacks: Any, **arguments: Any) -> None:
    arguments = {"verbose": 0, "epochs": 2, **arguments}
    model.fit(_X, _Y, batch_size=4, shuffle=False, callbacks=[*callbacks], **arguments)


class _Reads(keras.callbacks.Callback):
    """Reads the logs of each batch at once."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[dict[str, float]] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append(dict(logs))

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append(dict(logs))


class _Keeps(_Reads):
    """Keeps the logs of each batch, and reads none."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append(logs)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append(logs)


def _seen(callback: _Reads, *args: Any, **arguments: Any) -> list[dict[str, float]]:
    _fit(_model(*args), callback, validation_data=(_X[:8], _Y[:8]), **arguments)
    return [dict(logs) for logs in callback.seen]


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("kind", [keras.Sequential, _Custom, _Nested])
@pytest.mark.parametrize("scope", [_one, _two])
def test_logs_kept_until_the_end_are_those_of_their_step(
    scope: Scope, kind: Any, steps: int
) -> None:
    kept = _seen(_Keeps(), scope, kind, steps)
    assert kept == _seen(_Reads(), scope, kind, steps)
    expected = _seen(_Reads(), contextlib.nullcontext, kind, steps)
    assert len({logs.get("loss", 0.0) for logs in kept}) > 1 or kind is _Nested
    assert [list(logs) for logs in kept] == [list(logs) for logs in expected]
    for logs, wanted in zip(kept, expected, strict=True):
        assert logs == pytest.approx(wanted, rel=1e-5)
        assert {type(value) for value in logs.values()} == {float}


class _Disturbs(keras.callbacks.Callback):
    """Replaces the state of the metrics before others see the logs of a batch."""

    def __init__(self, disturb: Callable[[Any], object]) -> None:
        super().__init__()
        self._disturb = disturb

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 2:
            self._disturb(self.model)


@pytest.mark.parametrize(
    "disturb",
    [
        pytest.param(lambda model: model.reset_metrics(), marks=pytest.mark.slow),
        lambda model: model.evaluate(_X[:4], _Y[:4], verbose=0),
        pytest.param(lambda model: model.train_on_batch(_X[:4], _Y[:4]), marks=pytest.mark.slow),
        pytest.param(
            lambda model: model.train_function((), iter([(_X[:4], _Y[:4])])),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["reset", "evaluate", "train_on_batch", "step"],
)
@pytest.mark.parametrize("scope", [_one, pytest.param(_two, marks=pytest.mark.slow)])
def test_callback_before_changes_nothing_in_the_logs_of_the_step(
    scope: Scope, disturb: Callable[[Any], object]
) -> None:
    def logs_of_third(disturb: Callable[[Any], object]) -> Any:
        model, reads = _model(scope), _Reads()
        _fit(model, _Disturbs(disturb), reads, epochs=1)
        return reads.seen[2]

    assert logs_of_third(disturb) == logs_of_third(lambda model: None)


def test_logs_of_values_that_a_program_of_the_user_took_are_an_error() -> None:
    class Donates(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 1:
                model: Any = self.model
                stored = [variable.storage for variable in model.metrics_variables]
                jax.jit(lambda values: values, donate_argnums=0)(stored)
                _ = logs["loss"]

    with pytest.raises(RuntimeError, match="call dict\\(logs\\) in the callback"):
        _fit(_model(_one), Donates())


def test_entry_that_a_callback_adds_reaches_the_next() -> None:
    class Adds(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            logs["batch"] = batch

    reads = _Reads()
    _fit(_model(_two), Adds(), reads, epochs=1)
    assert [logs["batch"] for logs in reads.seen] == [0, 1, 2, 3, 4, 5]


def _num_reads(monkeypatch: pytest.MonkeyPatch, model: Any, *args: Any, **arguments: Any) -> int:
    """The number of times that results of metrics were computed for batches."""
    reads: list[int] = []

    class Counted(LateRead):
        def __init__(self, read: Callable[[], Any]) -> None:
            super().__init__(lambda: (reads.append(1), read())[1])

    _fit(model, *args, **arguments)  # compiles, and learns the names of the results
    monkeypatch.setattr(metric_logs, "LateRead", Counted)
    _fit(model, *args, **arguments)
    return len(reads)


def test_results_are_computed_only_for_a_callback_that_uses_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Counts(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            pass

    assert _num_reads(monkeypatch, _model(_two), Counts()) == 0
    assert _num_reads(monkeypatch, _model(_two), Counts(), _Reads()) == 12


class _Slow(keras.callbacks.Callback):
    """Draws the progress bar that often; after the callback, it counts as drawn."""

    def __init__(self, interval_s: float) -> None:
        super().__init__()
        self._interval_s = interval_s
        self.bar: Any = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.bar.progbar.interval = self._interval_s


@pytest.mark.slow
@pytest.mark.parametrize(("interval_s", "expected"), [(0.0, 12), (1e9, 2)])
def test_progress_bar_uses_the_logs_only_when_it_is_drawn(
    monkeypatch: pytest.MonkeyPatch, interval_s: float, expected: int
) -> None:
    if keras.version() < "3.15":
        pytest.skip("the progress bar of this Keras averages the logs of all batches")
    slow = _Slow(interval_s)
    slow.bar = keras.callbacks.ProgbarLogger()
    assert _num_reads(monkeypatch, _model(_two), slow.bar, slow, verbose=1) == expected


def test_callback_in_another_thread_sees_the_logs_of_its_step() -> None:
    class Late(_Reads):
        async_safe = True  # Keras calls it in a thread, while the next steps run

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            time.sleep(0.02)
            self.seen.append({"batch": batch, **logs})

    def seen(callback: Any) -> list[Any]:
        _fit(_model(_two), callback, epochs=1)
        return sorted(logs["loss"] for logs in callback.seen)

    assert seen(Late()) == seen(_Reads())


def test_step_function_called_by_hand_returns_logs_that_last() -> None:
    def logs_of_batches(read: Callable[[Any], Any]) -> list[Any]:
        model = _model(_two)
        _fit(model, epochs=1)
        model.reset_metrics()
        batches = [(_X[first : first + 4], _Y[first : first + 4]) for first in (0, 4, 8)]
        logs = [read(model.train_function((), iter([batch]))[0]) for batch in batches]
        return [{name: float(value) for name, value in one.items()} for one in logs]

    kept = logs_of_batches(lambda logs: logs)
    assert kept == logs_of_batches(dict)
    assert len({one["loss"] for one in kept}) == 3


@pytest.mark.slow
def test_batch_trained_by_a_callback_takes_none_from_the_epoch() -> None:
    def weights(scope: Scope) -> list[np.ndarray]:
        model = _model(scope)
        _fit(model, _Disturbs(lambda model: model.train_on_batch(_X[:4], _Y[:4])))
        return values_of(model.weights)

    for value, wanted in zip(weights(_two), weights(contextlib.nullcontext), strict=True):
        np.testing.assert_allclose(value, wanted, rtol=1e-5)
