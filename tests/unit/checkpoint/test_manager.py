"""Numbered checkpoints in one folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stratagem as sg
from stratagem.checkpoint import manager as manager_module
from stratagem.checkpoint.policies import KeepLatest, SaveEverySteps


def make(folder: Path, max_to_keep: Any = 3, **kwargs: Any) -> tuple[Any, Any]:
    step = sg.Variable(0, dtype="int32")
    checkpoint = sg.train.Checkpoint(step=step)
    return step, sg.train.CheckpointManager(checkpoint, folder, max_to_keep, **kwargs)


def names(manager: Any) -> list[str]:
    return [Path(path).name for path in manager.checkpoints]


def test_newest_are_kept_and_the_latest_is_restored(tmp_path: Path) -> None:
    step, manager = make(tmp_path / "run", max_to_keep=2)
    assert manager.latest_checkpoint is None
    for value in (5, 6, 7):
        step.assign(value)
        manager.save()
    assert names(manager) == ["ckpt-2", "ckpt-3"]
    assert sorted(os.listdir(tmp_path / "run")) == ["ckpt-2", "ckpt-3"]

    again, other = make(tmp_path / "run", max_to_keep=2)
    assert other.latest_checkpoint == str(tmp_path / "run" / "ckpt-3")
    assert other.restore_or_initialize() == other.latest_checkpoint
    assert int(again) == 7
    other.save()
    assert names(other) == ["ckpt-3", "ckpt-4"]


def test_numbers_are_compared_as_numbers(tmp_path: Path) -> None:
    _, manager = make(tmp_path, max_to_keep=None)
    for number in (9, 10, 100):
        manager.save(number)
    assert names(manager) == ["ckpt-9", "ckpt-10", "ckpt-100"]


def test_hourly_checkpoints_are_kept_besides_the_newest(tmp_path: Path) -> None:
    _, manager = make(tmp_path, max_to_keep=1, keep_checkpoint_every_n_hours=2)
    for hour in range(5):
        path = manager.save()
        os.utime(path, (3600 * hour, 3600 * hour))
    manager.save()
    assert names(manager) == ["ckpt-1", "ckpt-3", "ckpt-5", "ckpt-6"]


def test_interval_counts_steps_since_the_last_save_or_restore(tmp_path: Path) -> None:
    def run(step: Any, manager: Any, until: int) -> list[int]:
        saved = []
        for value in range(int(step) + 1, until):
            step.assign(value)
            if manager.save() is not None:
                saved.append(value)
        return saved

    step = sg.Variable(0, dtype="int32")
    checkpoint = sg.train.Checkpoint(step=step)
    manager = sg.train.CheckpointManager(
        checkpoint, tmp_path, None, step_counter=step, checkpoint_interval=3
    )
    assert manager.checkpoint_interval == 3
    assert run(step, manager, 8) == [3, 6]
    assert names(manager) == ["ckpt-3", "ckpt-6"]
    assert manager.save(check_interval=False) == str(tmp_path / "ckpt-7")

    manager.restore_or_initialize()
    assert run(step, manager, 12) == [10]
    assert manager.directory == str(tmp_path)


def test_policies_take_the_place_of_numbers(tmp_path: Path) -> None:
    step = sg.Variable(0, dtype="int32")
    manager = sg.train.CheckpointManager(
        sg.train.Checkpoint(step=step),
        tmp_path,
        KeepLatest(1),
        step_counter=step,
        checkpoint_interval=SaveEverySteps(2),
    )
    for value in range(1, 6):
        step.assign(value)
        manager.save()
    assert names(manager) == ["ckpt-4"]


def test_init_fn_runs_where_there_is_no_checkpoint(tmp_path: Path) -> None:
    begun = []
    _, manager = make(tmp_path, init_fn=lambda: begun.append(True))
    assert manager.restore_or_initialize() is None
    assert begun == [True]
    manager.save()
    assert manager.restore_or_initialize() is not None
    assert begun == [True]


def cut(path: str) -> None:
    """Truncates the largest array file to half its size."""
    files = [file for file in Path(path, "step_state").rglob("*") if file.is_file()]
    for file in files:
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def test_damaged_latest_is_an_error_and_skipped_on_request(tmp_path: Path) -> None:
    step, manager = make(tmp_path)
    for value in (1, 2, 3):
        step.assign(value)
        manager.save()
    cut(manager.checkpoints[-1])
    cut(manager.checkpoints[-2])
    with pytest.raises(sg.errors.DataLossError, match="is damaged"):
        manager.restore_or_initialize()
    assert manager.restore_or_initialize(skip_damaged=True) == manager.checkpoints[0]
    assert int(step) == 1
    cut(manager.checkpoints[0])
    with pytest.raises(sg.errors.DataLossError, match="ckpt-1 is damaged"):
        manager.restore_or_initialize(skip_damaged=True)


def test_unfinished_is_never_the_latest(tmp_path: Path) -> None:
    _, manager = make(tmp_path)
    first = manager.save()
    second = manager.save()
    (Path(second) / "commit_success.txt").unlink()
    (tmp_path / "ckpt-9.orbax-checkpoint-tmp").mkdir()
    (tmp_path / "ckpt-x").mkdir()
    assert manager.checkpoints == [first]


def test_a_number_that_is_taken_is_replaced_by_a_whole_one(tmp_path: Path, monkeypatch) -> None:
    step, manager = make(tmp_path)
    step.assign(1)
    path = manager.save(5)

    replace = manager_module._replace

    def killed(folder: Path) -> None:
        if folder.with_name(folder.name + ".new").exists():
            raise KeyboardInterrupt
        replace(folder)

    step.assign(2)
    with monkeypatch.context() as patch:  # as if killed when the new one is written
        patch.setattr(manager_module, "_replace", killed)
        with pytest.raises(KeyboardInterrupt):
            manager.save(5)
    manager.checkpoint.restore(path)
    assert int(step) == 1

    assert manager.checkpoints == [path + ".new"]
    assert manager.restore_or_initialize() == path + ".new"
    assert int(step) == 2
    step.assign(3)
    assert manager.save(5) == path
    manager.checkpoint.restore(path)
    assert int(step) == 3
    assert os.listdir(tmp_path) == ["ckpt-5"]


def test_failed_save_keeps_earlier_checkpoints(tmp_path: Path, monkeypatch) -> None:
    step, manager = make(tmp_path, max_to_keep=1)
    step.assign(4)
    first = manager.save()

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    ocp = pytest.importorskip("orbax.checkpoint.experimental.v1")
    with monkeypatch.context() as patch:
        patch.setattr(ocp, "save_checkpointables", full)
        with pytest.raises(OSError, match="No space left on device"):
            manager.save()
        with pytest.raises(OSError, match="No space left on device"):
            manager.save(7)
    assert int(manager.checkpoint.save_counter) == 1  # a save that failed does not count
    assert manager.checkpoints == [first]
    step.assign(0)
    manager.restore_or_initialize()
    np.testing.assert_array_equal(step.value, 4)
    assert names(manager) == ["ckpt-1"]
    manager.save()
    assert names(manager) == ["ckpt-2"]


@pytest.mark.parametrize("count", [0, -1])
def test_something_has_to_be_kept(tmp_path: Path, count: int) -> None:
    with pytest.raises(ValueError, match="would delete every checkpoint"):
        make(tmp_path, max_to_keep=count)


def test_interval_needs_a_counter(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="was passed without a step_counter"):
        make(tmp_path, checkpoint_interval=3)


def test_folder_that_another_process_names_is_there_after_a_save(tmp_path, monkeypatch) -> None:
    """TensorFlow's guides delete this folder afterwards; nothing is written to it."""
    checkpoint = sg.train.Checkpoint(step=sg.Variable(0))
    monkeypatch.setattr("stratagem.checkpoint.manager.is_first", lambda: False)
    monkeypatch.setattr(checkpoint, "save_as", lambda path, options, place: path)
    folder = tmp_path / "workertemp_1" / "ckpt"
    sg.train.CheckpointManager(checkpoint, folder, max_to_keep=1).save()
    assert list(folder.iterdir()) == []
