"""Checkpoints that are missing, damaged or foreign, and what saves need."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import stratagem as sg

BEHIND = sg.train.CheckpointOptions(enable_async=True)


def test_checkpoint_that_is_not_there_or_of_other_objects(tmp_path: Path) -> None:
    checkpoint = sg.train.Checkpoint(step=sg.Variable(1))
    path = Path(checkpoint.save(tmp_path / "ckpt"))
    with pytest.raises(ValueError, match=r"holds no epoch(?s:.)*save_counter, step"):
        sg.train.Checkpoint(epoch=sg.Variable(1)).restore(path)
    with pytest.raises(sg.errors.NotFoundError, match=r"does not exist(?s:.)*ckpt-1"):
        checkpoint.restore(tmp_path / "ckpt-7")
    (path / "commit_success.txt").unlink()
    with pytest.raises(sg.errors.NotFoundError, match="is not a complete checkpoint"):
        checkpoint.restore(path)


def error_of(work: Callable[[], None]) -> Exception | None:
    try:
        work()
    except (sg.errors.DataLossError, sg.errors.NotFoundError) as error:
        return error
    return None


def test_every_damaged_file_that_is_read_is_noticed(tmp_path: Path) -> None:
    """Truncated, changed or deleted files raise an error, or a second copy is read."""
    step = sg.Variable(np.arange(3000.0, dtype="float32"))
    checkpoint = sg.train.Checkpoint(step=step)
    whole = Path(checkpoint.save(tmp_path / "ckpt"))
    wanted = np.asarray(step.value)
    noticed = 0
    for file in sorted(p.relative_to(whole) for p in whole.rglob("*") if p.is_file()):
        if not str(file).startswith(("step", "_CHECKPOINT")):
            continue
        for damage in ("cut", "flipped", "gone"):
            copy = tmp_path / "copy"
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(whole, copy)
            content = bytearray((copy / file).read_bytes())
            if damage == "gone":
                (copy / file).unlink()
            else:
                content[len(content) // 2] ^= 0xFF
                keep = len(content) // 2 if damage == "cut" else len(content)
                (copy / file).write_bytes(content[:keep])
            step.assign(np.zeros(3000))
            error = error_of(lambda copy=copy: checkpoint.restore(copy))
            if error is not None:
                assert str(copy) in str(error)
                noticed += 1
                assert not np.any(np.asarray(step.value)), (file, damage)
            else:
                np.testing.assert_array_equal(step.value, wanted, err_msg=f"{file} {damage}")
    assert noticed >= 9


def test_name_that_is_taken_is_left_as_it_is(tmp_path: Path) -> None:
    step = sg.Variable(1, dtype="int32")
    checkpoint = sg.train.Checkpoint(step=step)
    checkpoint.write(tmp_path / "ckpt")
    step.assign(2)
    with pytest.raises(FileExistsError, match="already exists"):
        checkpoint.write(tmp_path / "ckpt")
    checkpoint.read(tmp_path / "ckpt")
    assert int(step) == 1


def test_training_waits_for_an_asynchronous_save_without_memory_for_the_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sizes_bytes: list[int] = []
    monkeypatch.setattr("stratagem.checkpoint.saving.has_room_for_copy", sizes_bytes.append)
    checkpoint = sg.train.Checkpoint(v=sg.Variable(np.arange(1000.0, dtype="float32")))
    path = Path(checkpoint.write(tmp_path / "ckpt", BEHIND))
    assert (path / "commit_success.txt").is_file()  # without `sync`
    assert sizes_bytes == [4000 + 4]  # with the counter
    assert "Training waits until" in caplog.text
    checkpoint.read(path).assert_consumed()
