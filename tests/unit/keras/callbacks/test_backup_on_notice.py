"""`BackupAndRestore` on a notice: one backup, and the next program is the one never ended."""

from __future__ import annotations

import itertools
import signal
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import stratagem as sg
from tests.unit.keras.callbacks.backups import (
    BATCH_SIZE,
    EPOCHS,
    NUM_BATCHES,
    AccidentError,
    X,
    Y,
    assert_same,
    build,
    strategy_named,
    values,
)


class Notice(keras.callbacks.Callback):
    """Tells this process that its machine will be taken away."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.step = step

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.step -= 1
        if not self.step:
            signal.raise_signal(signal.SIGTERM)


def leave() -> None:
    raise AccidentError


@pytest.mark.slow
@pytest.mark.parametrize(("name", "step"), [("none", NUM_BATCHES + 3), ("two", 2)])
def test_notice_leads_to_one_backup_and_the_next_program_goes_on(
    name: str, step: int, tmp_path: Path
) -> None:
    handler = signal.getsignal(signal.SIGTERM)
    config = sg.TerminationConfig(exit_fn=leave, grace_period=0)

    def run(*callbacks: Any) -> Any:
        backup = sg.BackupAndRestore(tmp_path, termination_config=config)
        model = build(strategy_named(name))
        try:
            model.fit(
                X,
                Y,
                batch_size=BATCH_SIZE,
                epochs=EPOCHS,
                verbose=0,
                callbacks=[backup, *callbacks],
            )
        finally:
            backup.stop_listening()
        return values(model)

    with pytest.raises(AccidentError):
        run(Notice(step))
    assert len(list(tmp_path.glob("backup-*"))) == 1
    assert_same(run(), run())  # the second one is not resumed
    assert signal.getsignal(signal.SIGTERM) is handler


class NoticeAtOnce(keras.callbacks.Callback):
    """Tells this process so before its first step."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        signal.raise_signal(signal.SIGTERM)


class Shuffled(keras.utils.PyDataset):
    """Draws a new order before each epoch."""

    order = np.arange(NUM_BATCHES)

    def __len__(self) -> int:
        return NUM_BATCHES

    def __getitem__(self, index: int) -> Any:
        first = self.order[index] * BATCH_SIZE
        return X[first : first + BATCH_SIZE], Y[first : first + BATCH_SIZE]

    def on_epoch_begin(self) -> None:
        self.order = np.random.permutation(NUM_BATCHES)


def endless() -> Any:
    """Yields the batches again and again; an epoch continues where the last one ended."""
    numbers = itertools.count()
    while True:
        first = next(numbers) % (2 * NUM_BATCHES - 3) % NUM_BATCHES * BATCH_SIZE
        yield X[first : first + BATCH_SIZE], Y[first : first + BATCH_SIZE]


@pytest.mark.slow
@pytest.mark.parametrize("step", [3, NUM_BATCHES + 1])
@pytest.mark.parametrize("source", ["array", "generator", "dataset"])
def test_notice_before_the_first_step_of_a_program_or_an_epoch(
    source: str, step: int, tmp_path: Path
) -> None:
    def run(*callbacks: Any) -> Any:
        config = sg.TerminationConfig(exit_fn=leave, grace_period=0)
        backup = sg.BackupAndRestore(tmp_path, termination_config=config)
        model = build(strategy_named("two"))
        options = {"epochs": EPOCHS, "verbose": 0, "callbacks": [*callbacks, backup]}
        try:
            if source == "array":
                model.fit(X, Y, batch_size=BATCH_SIZE, **options)
            elif source == "dataset":
                model.fit(Shuffled(), **options)
            else:
                model.fit(endless(), steps_per_epoch=NUM_BATCHES, shuffle=False, **options)
        finally:
            backup.stop_listening()
        return values(model)

    for notice in (Notice(step), NoticeAtOnce(), NoticeAtOnce()):
        with pytest.raises(AccidentError):
            run(notice)
    got = run()
    assert not tmp_path.exists()
    assert_same(got, run())


def test_notice_saves_the_backup_and_nothing_else() -> None:
    with pytest.raises(ValueError, match="received a termination_config with a save_fn"):
        sg.BackupAndRestore(
            "runs/backup", termination_config=sg.TerminationConfig(save_fn=lambda: None)
        )
