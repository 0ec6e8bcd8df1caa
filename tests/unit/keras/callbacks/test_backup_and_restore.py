"""A training that was ended and begun again is, bit for bit, the one that never was."""

from __future__ import annotations

import functools
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.errors import DataLossError
from tests.marks import slow
from tests.unit.keras.callbacks.backups import (
    BATCH_SIZE,
    EPOCHS,
    NUM_BATCHES,
    AccidentError,
    EndAt,
    EndAtBegin,
    X,
    Y,
    assert_same,
    build,
    ended_and_again,
    strategy_named,
    values,
)


def train(
    *callbacks: Any,
    strategy: Any = None,
    folder: Any = None,
    freq: Any = 2,
    saving: Any = None,
    **options: Any,
) -> tuple[list[np.ndarray], Any]:
    """What a program does; returns what is left in variables, and the history.

    `saving` has more arguments of `BackupAndRestore`.
    """
    compiled = {
        name: options.pop(name) for name in ("optimizer", "steps_per_execution") if name in options
    }
    model = build(strategy, **compiled)
    backup = [] if folder is None else [sg.BackupAndRestore(folder, freq, **(saving or {}))]
    given = {"batch_size": BATCH_SIZE, "epochs": EPOCHS, "verbose": 0} | options
    history = model.fit(X, Y, callbacks=[*backup, *callbacks], **given)
    return values(model), history


@functools.cache
def undisturbed(name: str, steps_per_execution: int = 1) -> tuple[list[np.ndarray], Any]:
    return train(strategy=strategy_named(name), steps_per_execution=steps_per_execution)


_BEHIND = {"options": sg.train.CheckpointOptions(enable_async=True)}


@pytest.mark.parametrize(
    ("name", "freq", "steps", "ends", "saving"),
    [
        ("two", 3, (1, 1), [EndAt(4)], None),
        slow("none", 1, (1, 1), [EndAt(2), EndAtBegin(NUM_BATCHES)], None),
        slow("none", "epoch", (1, 1), [EndAt(2 * NUM_BATCHES - 1)], None),
        slow("none", 1, (3, 2), [EndAt(2)], None),  # other numbers of steps an execution
        slow("one", 2, (1, 1), [EndAtBegin(NUM_BATCHES + 3)], None),
        slow("two", 2, (1, 1), [EndAt(NUM_BATCHES)], None),
        slow("two", 1, (1, 1), [EndAt(4), EndAtBegin(NUM_BATCHES + 3)], _BEHIND),
    ],
)
def test_goes_on_at_the_next_batch(name, freq, steps, ends, saving, tmp_path) -> None:
    def run(*callbacks: Any) -> Any:
        options: Any = {"steps_per_execution": steps[0] if callbacks else steps[1]}
        options |= {"freq": freq, "saving": saving, "strategy": strategy_named(name)}
        return train(*callbacks, folder=tmp_path, **options)

    wanted, expected = undisturbed(name)
    got, history = ended_and_again(run, *ends)
    assert_same(got, wanted)
    assert history.epoch == expected.epoch == [0, 1, 2]
    assert not tmp_path.exists()
    assert steps[0] > 1 or history.history == expected.history


@pytest.mark.slow
def test_many_steps_an_execution_are_saved_at_the_first_boundary(tmp_path: Path) -> None:
    """3 and 3 and 1 batches: 4 are done after 6, and 4 more after the end of the epoch."""
    batches: list[int] = []
    note = keras.callbacks.LambdaCallback(on_train_batch_end=lambda b, logs: batches.append(b))

    def run(*callbacks: Any) -> Any:
        options: Any = {"steps_per_execution": 3, "strategy": strategy_named("two")}
        return train(*callbacks, folder=tmp_path, freq=4, **options)

    with pytest.raises(AccidentError):
        run(EndAt(3))
    got, _ = run(note)
    assert_same(got, undisturbed("two", 3)[0])
    assert batches == [8, 2, 5, 8, 2, 5, 8]


@pytest.mark.slow
def test_validation_is_done_again_where_it_was_not_saved(tmp_path: Path) -> None:
    class EndInValidation(keras.callbacks.Callback):
        def on_test_begin(self, logs: Any = None) -> None:
            raise AccidentError

    def run(*callbacks: Any, folder: Any = tmp_path) -> Any:
        given = {"validation_data": (X[:20], Y[:20]), "epochs": 2}
        return train(*callbacks, folder=folder, freq=NUM_BATCHES, **given)

    _, expected = run(folder=None)
    _, history = ended_and_again(run, EndInValidation())
    assert history.history == expected.history
    assert "val_mae" in expected.history


class Counted(keras.callbacks.Callback):
    """Knows something that no variable holds, and draws from the global generators."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.drawn: list[float] = []

    def get_state(self) -> Any:
        return {"count": self.count, "drawn": self.drawn}

    def set_state(self, state: Any) -> None:
        self.count, self.drawn = state["count"], state["drawn"]

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.count += 1
        self.drawn.append(float(np.random.random() + keras.random.uniform(())))

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.drawn.append(float(np.random.random()))


@pytest.mark.slow
@pytest.mark.parametrize("freq", [3, "epoch"])
def test_callbacks_know_what_they_knew(freq: Any, tmp_path: Path) -> None:
    """A rate that is multiplied at each epoch, one that follows the loss, and what is best."""

    def run(*ends: Any, folder: Any = tmp_path / "backup") -> Any:
        counted = Counted()
        callbacks = [
            *ends,
            counted,
            keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
            keras.callbacks.ReduceLROnPlateau("mae", patience=1, min_delta=10.0),
            keras.callbacks.EarlyStopping("mae", patience=3, mode="max", restore_best_weights=True),
        ]
        options: Any = {"epochs": 6, "optimizer": "sgd", "folder": folder, "freq": freq}
        got, history = train(*callbacks, **options)
        return got, history, counted

    wanted, expected, count = run(folder=None)
    ends = [EndAt(4 * NUM_BATCHES - 1)] if freq == "epoch" else [EndAt(3 * NUM_BATCHES - 1)]
    got, history, counted = ended_and_again(run, *ends)
    assert len(expected.epoch) == 4  # it was stopped early
    assert history.history == expected.history
    assert counted.get_state() == count.get_state()
    assert_same(got, wanted)


@pytest.mark.slow
def test_training_that_a_callback_stopped_stays_stopped(tmp_path: Path) -> None:
    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.stop_training = True

        def on_train_end(self, logs: Any = None) -> None:
            if ends:
                raise ends.pop()

    ends: list[Exception] = []
    wanted, _ = train(Stop())
    ends.append(AccidentError())
    with pytest.raises(AccidentError):
        train(Stop(), folder=tmp_path)
    got, history = train(Stop(), folder=tmp_path)
    assert history.epoch == [0]
    assert_same(got, wanted)


def test_finished_training_is_not_done_again_and_more_epochs_are(tmp_path: Path) -> None:
    def fit(epochs: int) -> tuple[Any, Any]:
        kept = {"delete_checkpoint": False}
        return train(folder=tmp_path, freq="epoch", saving=kept, epochs=epochs)

    first, expected = fit(2)
    again, history = fit(2)
    assert_same(again, first)
    assert (history.history, history.epoch) == (expected.history, [0, 1])
    more, history = fit(3)
    assert history.epoch == [0, 1, 2]
    assert_same(more, undisturbed("none")[0])


@pytest.mark.slow
def test_model_that_went_on_begins_its_next_fit_at_the_first_epoch(tmp_path: Path) -> None:
    with pytest.raises(AccidentError):
        train(EndAt(2 * NUM_BATCHES + 1), folder=tmp_path / "backup")
    model = build(None)
    (tmp_path / "backup" / "notes.txt").write_text("mine")
    model.fit(X, Y, BATCH_SIZE, EPOCHS, 0, [sg.BackupAndRestore(tmp_path / "backup", 2)])
    assert [path.name for path in (tmp_path / "backup").iterdir()] == ["notes.txt"]
    assert model.fit(X, Y, BATCH_SIZE, epochs=2, verbose=0).epoch == [0, 1]


def test_no_batch_waits_for_logs_that_nobody_asked_for() -> None:
    backup = sg.BackupAndRestore("runs/backup")
    assert keras.callbacks.Callback.on_train_batch_end is type(backup).on_train_batch_end
    assert vars(sg.BackupAndRestore("runs/backup", 5))["on_train_batch_end"] is not None


def damage(path: Path) -> None:
    """Takes half of what a checkpoint says of itself away."""
    file = path / "_CHECKPOINT_METADATA"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.mark.slow
def test_damaged_backup_falls_back_to_the_one_before(tmp_path: Path) -> None:
    folder = tmp_path / "backup"

    def fit(*callbacks: Any) -> Any:
        return train(*callbacks, folder=folder, saving={"double_checkpoint": True})[0]

    with pytest.raises(AccidentError):
        fit(EndAt(10))
    first, second = sorted(folder.iterdir())
    damage(second)
    with pytest.raises(AccidentError):
        fit(EndAt(4))
    assert sorted(folder.iterdir()) == [first, second]  # made anew
    damage(second)
    assert_same(fit(), undisturbed("none")[0])
    assert not first.exists()


def test_what_a_backup_does_not_fit_and_a_damaged_one_are_reported(tmp_path: Path) -> None:
    with pytest.raises(AccidentError):
        train(EndAt(4), folder=tmp_path)
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2)])
    model.compile("adam", "mse")
    with pytest.raises(ValueError, match=r"holds 4 variables of model, which has 2"):
        model.fit(X, X[:, :2], verbose=0, callbacks=sg.BackupAndRestore(tmp_path))
    words = "was saved at batch 2 of 7, but an epoch now has 13 batches"
    with pytest.raises(ValueError, match=words):
        train(folder=tmp_path, batch_size=4)
    (only,) = tmp_path.iterdir()
    damage(only)
    with pytest.raises(DataLossError, match="is damaged"):
        train(folder=tmp_path)
    assert only.exists()


@pytest.mark.parametrize("freq", [0, True, 1.5, "batch", None])
def test_folder_and_frequency_that_are_none(freq: Any) -> None:
    with pytest.raises(ValueError, match=r"backup_dir=.* is empty"):
        sg.BackupAndRestore("")
    with pytest.raises(ValueError, match=r"save_freq=.* is not valid"):
        sg.BackupAndRestore("backup", freq)
    if freq not in (None, "epoch"):
        with pytest.raises(ValueError, match=r"memory_save_freq=.* is not valid"):
            sg.BackupAndRestore("backup", memory_save_freq=freq)


def test_backup_that_was_not_written_is_reported_at_the_end(tmp_path: Path) -> None:
    class Harm(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            shutil.rmtree(folder, ignore_errors=True)
            folder.write_text("a file")

    folder = tmp_path / "backup"
    with pytest.raises(OSError, match=f"{folder}"):
        train(Harm(), folder=folder, freq="epoch", epochs=1, saving=_BEHIND)


def test_model_that_is_not_built_and_no_fit(tmp_path: Path) -> None:
    backup = sg.BackupAndRestore(tmp_path)
    backup.set_model(keras.Sequential([keras.layers.Dense(1)]))
    with pytest.raises(ValueError, match="is not built"):
        backup.on_train_begin()
    backup.set_model(build(None))
    with pytest.raises(RuntimeError, match="outside of fit"):
        backup.on_train_begin()


_PROGRAM = """
import os, signal, sys
import stratagem as sg
import keras
import numpy as np
from tests.unit.keras.callbacks.backups import BATCH_SIZE, EPOCHS, X, Y, build, values
from tests.unit.keras.callbacks.backups import strategy_named

name, folder, result, how = sys.argv[1:]

class Kill(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        if how == "batch" and self.model.optimizer.iterations == 9:
            os.kill(os.getpid(), signal.SIGKILL)

def kill(event, arguments):
    # The second backup is being written: the first file in it is opened.
    if how == "save" and event == "open" and "backup-2" in str(arguments[0]):
        os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(kill)
model = build(strategy_named(name))
model.fit(X, Y, batch_size=BATCH_SIZE, epochs=EPOCHS, verbose=0,
          callbacks=[Kill(), sg.BackupAndRestore(folder, 2)])
np.savez(result, *values(model))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "how"), [("none", "save"), ("none", "batch"), ("two", "save")])
def test_killed_program_goes_on_when_it_is_started_again(name, how, tmp_path) -> None:
    def program(how: str) -> int:
        arguments = [name, str(tmp_path / "backup"), str(tmp_path / "values.npz"), how]
        return subprocess.run(
            [sys.executable, "-c", _PROGRAM, *arguments],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            timeout=120,
            check=False,
        ).returncode

    assert program(how) == -signal.SIGKILL
    assert (tmp_path / "backup" / "backup-1").exists() == (how == "save")
    assert program("not") == 0
    with np.load(tmp_path / "values.npz") as got:
        assert_same([got[key] for key in got], undisturbed(name)[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "freq", "at_begin"),
    [
        ("none", 1, [NUM_BATCHES, NUM_BATCHES + 2]),
        ("two", 1, [NUM_BATCHES, NUM_BATCHES + 2]),
        ("two", 2, [NUM_BATCHES - 1, NUM_BATCHES]),
    ],
)
def test_state_of_each_step_is_kept_in_memory(name, freq, at_begin, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("STRATAGEM_MEMORY_DIR", str(tmp_path / "memory"))
    first_steps: list[int] = []

    class FirstStep(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if len(first_steps) < runs:
                first_steps.append(int(self.model.optimizer.iterations))

    runs = 0

    def run(*ends: Any) -> Any:
        nonlocal runs
        runs += 1
        return train(
            FirstStep(),
            *ends,
            strategy=strategy_named(name),
            folder=tmp_path / "disk",
            freq="epoch",
            saving={"memory_save_freq": freq},
        )[0]

    got = ended_and_again(run, EndAtBegin(3), EndAtBegin(NUM_BATCHES - 3), EndAtBegin(2))
    assert_same(got, undisturbed(name)[0])
    assert first_steps == [0, 3 // freq * freq, *at_begin]
    assert_same(run(), undisturbed(name)[0])  # what has ended is not gone on with
    assert first_steps[-1] == 0
