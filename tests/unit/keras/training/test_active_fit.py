"""Order of callbacks, the batch logs that they read, and the iterator of the active `fit`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import stratagem as sg
import stratagem.keras
from stratagem.keras.training.active_fit import (
    FitProgress,
    awaits_each_step,
    call_after_fit,
    epoch_iterator,
)
from stratagem.observe import process_writer
from stratagem.observe.events import ProgressEvent, read_run
from stratagem.observe.writer import EventWriter
from tests.marks import slow
from tests.unit.keras.replicas import dense_model, two


class Quiet(keras.callbacks.Callback): ...


class AtBatches(keras.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None: ...


class WithoutLogs(AtBatches):
    needs_batch_logs = False


class Last(Quiet):
    runs_last = True


class Awaiting(WithoutLogs):
    awaits_steps = True


def test_callbacks_that_run_last_do_and_get_the_list() -> None:
    first, second, last = Quiet(), Quiet(), Last()
    made = keras.callbacks.CallbackList([last, first, second])
    own = [one for one in made.callbacks if one in (first, second, last)]
    assert own == [first, second, last]
    assert made.callbacks[-1] is last
    assert last.callback_list is made
    assert not hasattr(first, "callback_list")


@pytest.mark.parametrize(
    ("callback", "expected"),
    [(Quiet(), False), (WithoutLogs(), False), (Awaiting(), True), (AtBatches(), True)],
)
def test_steps_are_awaited_for_callbacks_that_need_it(callback, expected) -> None:
    class Recorder(Quiet):
        awaited: Any = None
        iterator: Any = None

        def on_train_begin(self, logs: Any = None) -> None:
            call_after_fit(lambda: notes.append("after"))

        def on_train_end(self, logs: Any = None) -> None:
            notes.append("end")
            if len(notes) > 2:
                raise ZeroDivisionError

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.awaited, self.iterator = awaits_each_step(), epoch_iterator()

    notes: list[str] = []
    recorder = Recorder()
    model = dense_model()
    data = np.ones((4, 3)), np.ones((4, 1))
    # Validation makes an iterator of its own, which is not the one of `fit`.
    model.fit(*data, 2, verbose=0, callbacks=[recorder, callback], validation_data=data)
    assert recorder.awaited is expected
    assert recorder.iterator.data_adapter.num_batches == 2
    assert awaits_each_step(), "outside fit"
    with pytest.raises(ZeroDivisionError):
        model.fit(*data, 2, verbose=0, callbacks=[recorder])
    call_after_fit(lambda: notes.append("never"))  # no fit is active
    assert notes == ["end", "after"] * 2, "even if it fails"


# Progress of `fit`: totals, values, and its place among the callbacks.


def progress_in(folder: Path) -> list[ProgressEvent]:
    (process,) = read_run(folder).processes
    return [event for event in process.events if isinstance(event, ProgressEvent)]


def recorded(folder: Path, steps: int | None, epoch: int, num_done: int, logs: Any) -> list[Any]:
    """What an epoch of four is told, as Keras and the step events call the recorder."""
    with EventWriter(folder, "worker", 0, num_processes=1) as writer:
        progress = FitProgress(writer, 4, steps)
        progress.on_epoch_begin(epoch)
        progress.begin(num_done)
        for step in range(num_done + 1, (steps or 3) + num_done + 1):
            writer.step(step)
        progress.on_epoch_end(epoch, logs)
    return progress_in(folder)


@pytest.mark.parametrize(
    ("steps", "epoch", "num_done", "expected"),
    [
        (10, 0, 0, [(0, 40, 0, 4), (10, 40, 1, 4)]),
        (10, 0, 100, [(100, 140, 0, 4), (110, 140, 1, 4)]),
        (10, 2, 25, [(25, 40, 2, 4), (35, 45, 3, 4)]),  # 25 of 40 are done, 5 of the third epoch
        (None, 0, 0, [(0, None, 0, 4), (3, None, 1, 4)]),
    ],
    ids=["first fit", "second fit", "after a restart", "data without a length"],
)
def test_total_is_steps_left_in_all_epochs(tmp_path, steps, epoch, num_done, expected) -> None:
    # Values that are no numbers are left out; those of a batch are named as Keras does.
    logs = {"loss": np.float32(0.5), "worst": float("inf"), "per class": np.zeros(3)}
    logs["of a batch"] = {"mean": np.float32(2), "more": {"inner": 3}}
    found = recorded(tmp_path, steps, epoch, num_done, logs)
    assert [(e.step, e.total_steps, e.epoch, e.num_epochs) for e in found] == expected
    assert found[-1].values == {"loss": 0.5, "worst": None, "mean": 2.0, "inner": 3.0}


def test_logs_of_steps_are_read_once_in_a_while(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(process_writer, "_current", process_writer._EventState())
    reads = []

    def logs() -> dict[str, float]:
        reads.append(1)
        return {"loss": 1.0}

    with EventWriter(tmp_path, "worker", 0, num_processes=1) as writer:
        progress = FitProgress(writer, 1, 1)
        for _ in range(100):
            progress.record_if_due(logs)
    assert len(reads) == len(progress_in(tmp_path)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("has_strategy", [False, True])
def test_fit_records_the_values_of_its_history(tmp_path, monkeypatch, has_strategy) -> None:
    monkeypatch.setenv("STRATAGEM_RUN_DIR", str(tmp_path))
    monkeypatch.setattr(process_writer, "_current", process_writer._EventState())
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    rows = np.arange(24, dtype="float32").reshape(8, 3) / 24

    model = dense_model(two) if has_strategy else dense_model()
    data = rows, rows[:, :1]
    try:
        history = model.fit(*data, batch_size=4, epochs=3, verbose=0, validation_data=data)
    finally:
        process_writer.close_events(0)
    ends = [one for one in progress_in(tmp_path) if "val_loss" in one.values]
    assert [one.step for one in ends] == [2, 4, 6]
    assert {one.total_steps for one in progress_in(tmp_path)} == {6}
    for name in ("loss", "val_loss"):
        assert [one.values[name] for one in ends] == pytest.approx(history.history[name])


# Building of metrics without a trace of the model.

_X, _Y = np.ones((8, 3), np.float32), np.zeros((8, 1), np.int32)


class _Counted(keras.layers.Layer):
    """Counts the calls of the model around it."""

    num_calls = 0

    def call(self, x):
        type(self).num_calls += 1
        return x * 1.0


def _model(kind):
    if kind == "sequential":
        return keras.Sequential([keras.Input((3,)), _Counted(), keras.layers.Dense(2)])
    x = keras.Input((3,))
    y = keras.layers.Dense(2)(_Counted()(x))
    if kind == "two_outputs":
        return keras.Model(x, {"one": y, "two": keras.layers.Dense(1)(y)})
    return keras.Model(x, y)


def _compile(model, kind):
    loss: Any = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    metrics: Any = ["accuracy", "mse"]
    if kind == "two_outputs":
        loss, metrics = {"one": loss, "two": "mse"}, {"one": ["accuracy"], "two": ["mae"]}
    model.compile("sgd", loss, metrics=metrics)


def _labels(kind):
    return {"one": _Y, "two": _Y.astype(np.float32)} if kind == "two_outputs" else _Y


@pytest.mark.parametrize("kind", ["functional", slow("sequential"), slow("two_outputs")])
def test_a_model_is_traced_once_and_reports_what_keras_reports(kind) -> None:
    keras.utils.set_random_seed(0)
    plain = _model(kind)
    _compile(plain, kind)
    expected = plain.fit(_X, _labels(kind), verbose=0).history
    keras.utils.set_random_seed(0)
    with sg.OneDeviceStrategy("cpu:0").scope():
        model = _model(kind)
        _compile(model, kind)
    _Counted.num_calls = 0
    history = model.fit(_X, _labels(kind), verbose=0).history
    assert _Counted.num_calls == 1
    assert history.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-6)


@pytest.mark.parametrize("kind", ["own_call", "open_shape", "not_built"])
def test_a_model_whose_outputs_are_not_known_is_traced_by_keras(kind) -> None:
    class OwnCall(keras.Model):
        def call(self, x):
            return self.dense(x)

        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(2)

    with sg.OneDeviceStrategy("cpu:0").scope():
        if kind == "own_call":
            model = OwnCall()
        elif kind == "not_built":
            model = keras.Sequential([keras.layers.Dense(2)])
        else:
            x = keras.Input((None, 3))
            model = keras.Model(x, keras.layers.Dense(2)(x))
        _compile(model, kind)
    x, y = (_X, _Y) if kind != "open_shape" else (_X[:, None], _Y[:, None])
    assert {"loss", "accuracy"} <= model.fit(x, y, verbose=0).history.keys()
