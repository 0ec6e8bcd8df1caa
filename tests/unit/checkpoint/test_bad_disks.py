"""Full disks, read-only disks and lost files raise errors and harm nothing else."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.checkpoint.in_memory import MemoryBackup
from stratagem.errors import DataLossError

_DISK_BYTES = 4 * 2**20


def _mount(folder: Path, *options: str) -> bool:
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", ",".join(options), "tmpfs", str(folder)],
        capture_output=True,
        check=False,
    )
    return done.returncode == 0


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small separate disk."""
    folder = tmp_path / "disk"
    folder.mkdir()
    try:
        if not _mount(folder, f"size={_DISK_BYTES}"):
            pytest.skip("only root may mount a disk")
    except FileNotFoundError:
        pytest.skip("there is no mount")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def _options(*, is_async: bool) -> sg.train.CheckpointOptions:
    return sg.train.CheckpointOptions(enable_async=is_async)


def _noise(count: int) -> np.ndarray:
    """Values that do not compress."""
    return np.random.default_rng(count).random(count)


@pytest.mark.parametrize("is_async", [False, True])
def test_full_disk(is_async: bool, disk: Path) -> None:
    small = sg.Variable(1.0)
    manager = sg.train.CheckpointManager(sg.train.Checkpoint(value=small), disk, max_to_keep=2)
    good = manager.save()
    large = sg.Variable(_noise(3 * 10**6))
    too_large = sg.train.Checkpoint(value=small, large=large)

    def save() -> None:
        too_large.save(disk / "ckpt-large", _options(is_async=is_async))
        too_large.sync()

    with pytest.raises(OSError, match=r"(?is)could not be written.*(no space|quota|exhausted)"):
        save()
    assert sorted(path.name for path in disk.iterdir()) == ["ckpt-1"]
    small.assign(2.0)
    assert manager.restore_or_initialize() == good
    assert float(small) == 1.0
    manager.save(options=_options(is_async=is_async))  # and goes on where there is room
    manager.sync()
    assert [Path(path).name for path in manager.checkpoints] == ["ckpt-1", "ckpt-2"]


@pytest.mark.parametrize("is_async", [False, True])
def test_disk_that_may_not_be_written(is_async: bool, disk: Path) -> None:
    value = sg.Variable(1.0)
    manager = sg.train.CheckpointManager(sg.train.Checkpoint(value=value), disk, max_to_keep=2)
    good = manager.save()
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    value.assign(2.0)

    def save() -> None:
        manager.save(options=_options(is_async=is_async))
        manager.sync()

    with pytest.raises(OSError, match=r"(?is)could not be written.*read-only"):
        save()
    assert manager.restore_or_initialize() == good
    assert float(value) == 1.0


def test_missing_shard(tmp_path: Path) -> None:
    value = sg.Variable(_noise(10**5))
    manager = sg.train.CheckpointManager(sg.train.Checkpoint(value=value), tmp_path, max_to_keep=3)
    wanted = np.asarray(value.value)
    good = manager.save()
    value.assign(wanted + 1)
    newest = manager.save()
    assert newest is not None
    for shard in Path(newest).glob("value_state/d/*"):
        shard.unlink()
    value.assign(wanted + 2)
    with pytest.raises(DataLossError, match=r"(?s)ckpt-2.* is damaged.*skip_damaged=True"):
        manager.restore_or_initialize()
    np.testing.assert_array_equal(np.asarray(value.value), wanted + 2)
    assert manager.restore_or_initialize(skip_damaged=True) == good
    np.testing.assert_array_equal(np.asarray(value.value), wanted)


def test_lack_of_memory_raises_and_keeps_the_older_state(disk: Path) -> None:
    value = sg.Variable(np.full(10, 1.0))
    memory = MemoryBackup(sg.train.Checkpoint(value=value), disk)
    memory.save(1)
    large = MemoryBackup(sg.train.Checkpoint(value=value, large=sg.Variable(_noise(10**6))), disk)
    large.restore()  # of other objects: nothing, and what was there is forgotten
    memory.save(1)
    with pytest.raises(OSError, match="No space left"):
        MemoryBackup(sg.train.Checkpoint(value=sg.Variable(_noise(2 * 10**6))), disk).save(2)
    value.assign(np.zeros(10))
    assert memory.restore() == 1
    assert (np.asarray(value.value) == 1).all()


@pytest.mark.slow
def test_fit_continues_without_memory(
    disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STRATAGEM_MEMORY_DIR", str(disk))
    model = keras.Sequential([keras.layers.Input((1000,)), keras.layers.Dense(1000)])
    model.compile("adam", "mse")
    backup = sg.BackupAndRestore(tmp_path / "backup", delete_checkpoint=False)
    rows = np.ones((8, 1000), "float32")
    with pytest.warns(RuntimeWarning, match=r"no longer be saved in .*: .*No space left"):
        model.fit(rows, rows, batch_size=2, verbose=0, callbacks=[backup])
    assert len(list((tmp_path / "backup").iterdir())) == 1
