"""The newest checkpoint of a folder is the last complete one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import stratagem as sg


@pytest.fixture
def checkpoint() -> sg.train.Checkpoint:
    return sg.train.Checkpoint(step=sg.Variable(0))


def test_folder_without_checkpoints_has_none(tmp_path: Path) -> None:
    (tmp_path / "notes-1").mkdir()
    assert sg.train.latest_checkpoint(tmp_path) is None
    assert sg.train.latest_checkpoint(tmp_path / "none") is None


def test_newest_is_by_time_and_not_by_number(checkpoint, tmp_path: Path) -> None:
    manager = sg.train.CheckpointManager(checkpoint, tmp_path, None)
    for number in (9, 10, 2):
        path = manager.save(checkpoint_number=number)
        assert path is not None
        assert sg.train.latest_checkpoint(tmp_path) == path
    assert os.path.basename(path) == "ckpt-2"


def test_checkpoint_that_was_not_written_to_its_end_does_not_count(checkpoint, tmp_path) -> None:
    first = checkpoint.save(tmp_path / "ckpt")
    second = Path(checkpoint.save(tmp_path / "ckpt"))
    (second / "commit_success.txt").unlink()
    assert sg.train.latest_checkpoint(tmp_path) == first


def test_checkpoints_of_an_estimator_are_found(tmp_path: Path) -> None:
    saved = sg.train.CheckpointManager(
        sg.train.Checkpoint(step=sg.Variable(0)), tmp_path, None, checkpoint_name="model.ckpt"
    ).save(checkpoint_number=120)
    assert sg.train.latest_checkpoint(tmp_path) == saved


def test_iterator_yields_each_newest_once_and_ends_by_its_function(checkpoint, tmp_path) -> None:
    asked: list[int] = []

    def save_or_end() -> bool:
        asked.append(len(asked))
        if len(asked) > 2:
            return True
        checkpoint.save(tmp_path / "ckpt")
        return False

    found = sg.train.checkpoints_iterator(tmp_path / ".", timeout=0, timeout_fn=save_or_end)
    assert [os.path.basename(path) for path in found] == ["ckpt-1", "ckpt-2"]


def test_iterator_skips_superseded_checkpoints(checkpoint, tmp_path: Path) -> None:
    found = sg.train.checkpoints_iterator(tmp_path, timeout=0)
    checkpoint.save(tmp_path / "ckpt")
    assert os.path.basename(next(found)) == "ckpt-1"
    checkpoint.save(tmp_path / "ckpt")
    checkpoint.save(tmp_path / "ckpt")
    assert [os.path.basename(path) for path in found] == ["ckpt-3"]
