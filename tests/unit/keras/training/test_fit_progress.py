"""Progress of `fit`: totals, values, and its place among the callbacks."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from stratagem.keras.training.active_fit import FitProgress
from stratagem.observe.run_events import process_writer
from stratagem.observe.run_events.reader import read_run
from stratagem.observe.run_events.records import ProgressEvent
from stratagem.observe.run_events.writer import EventWriter
from tests.parity.comparison import mirrored


def progress_in(folder: Path) -> list[ProgressEvent]:
    (process,) = read_run(folder).processes
    return [event for event in process.events if isinstance(event, ProgressEvent)]


@dataclasses.dataclass
class Call:
    """A part of `fit`, as Keras and the step events call the recorder."""

    folder: Path
    num_epochs: int | None = 4
    steps: int | None = 10

    def run(self, epoch: int, num_done: int, logs: Any = None) -> list[tuple[Any, ...]]:
        with EventWriter(self.folder, "worker", 0, num_processes=1) as writer:
            progress = FitProgress(writer, self.num_epochs, self.steps)
            progress.on_epoch_begin(epoch)
            progress.begin(num_done)
            for step in range(num_done + 1, (self.steps or 3) + num_done + 1):
                writer.step(step)
            progress.on_epoch_end(epoch, logs)
        return [
            (one.step, one.total_steps, one.epoch, one.num_epochs)
            for one in progress_in(self.folder)
        ]


def test_total_is_steps_left_in_all_epochs(tmp_path) -> None:
    assert Call(tmp_path).run(0, 0) == [(0, 40, 0, 4), (10, 40, 1, 4)]


def test_second_fit_counts_on(tmp_path) -> None:
    assert Call(tmp_path).run(0, 100) == [(100, 140, 0, 4), (110, 140, 1, 4)]


def test_epoch_that_a_restart_interrupted_counts_once(tmp_path) -> None:
    """25 of 40 steps are done: the third epoch has 5 left."""
    assert Call(tmp_path).run(2, 25)[0] == (25, 40, 2, 4)


def test_total_is_unknown_for_data_without_a_length(tmp_path) -> None:
    assert Call(tmp_path, steps=None).run(0, 0) == [(0, None, 0, 4), (3, None, 1, 4)]


def test_values_that_are_no_numbers_are_left_out(tmp_path) -> None:
    logs = {"loss": np.float32(0.5), "worst": float("inf"), "per class": np.zeros(3)}
    logs["of a batch"] = {"mean": np.float32(2), "more": {"inner": 3}}  # named as Keras does
    Call(tmp_path).run(0, 0, logs)
    values = progress_in(tmp_path)[-1].values
    assert values == {"loss": 0.5, "worst": None, "mean": 2.0, "inner": 3.0}


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

    def fitted() -> keras.callbacks.History:
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        data = (rows, rows[:, :1])
        return model.fit(*data, batch_size=4, epochs=3, verbose=0, validation_data=data)

    try:
        if has_strategy:
            with mirrored(2).scope():
                history = fitted()
        else:
            history = fitted()
    finally:
        process_writer.close_events(0)
    ends = [one for one in progress_in(tmp_path) if "val_loss" in one.values]
    assert [one.step for one in ends] == [2, 4, 6]
    assert {one.total_steps for one in progress_in(tmp_path)} == {6}
    for name in ("loss", "val_loss"):
        assert [one.values[name] for one in ends] == pytest.approx(history.history[name])
