"""A training whose state no longer fits into memory."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

import stratagem as sg
from stratagem.checkpoint.in_memory import MemoryBackup
from tests.unit.keras.callbacks.backups import X, Y, assert_same, build, values


@pytest.mark.slow
def test_memory_without_room_is_warned_of_once_and_training_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(memory: Any, step: int) -> float:
        raise OSError(errno.ENOSPC, "No space left on device")

    def train(*callbacks: Any) -> Any:
        model = build(None)
        model.fit(X, Y, batch_size=4, epochs=2, verbose=0, callbacks=list(callbacks))
        return values(model)

    wanted = train()
    monkeypatch.setenv("STRATAGEM_MEMORY_DIR", str(tmp_path / "memory"))
    monkeypatch.setattr(MemoryBackup, "save", save)
    words = r"(?s)can no longer be saved in .*memory: .*No space left.*resumes from .*disk"
    with pytest.warns(RuntimeWarning, match=words) as caught:
        got = train(sg.BackupAndRestore(tmp_path / "disk", memory_save_freq=1))
    assert sum("no longer be saved" in str(one.message) for one in caught) == 1
    assert_same(got, wanted)


def test_loss_of_another_process_is_no_lack_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """UnavailableError is an OSError, and a save waits for the step, which needs all processes."""

    def save(memory: Any, step: int) -> float:
        raise sg.errors.UnavailableError("worker 1 has not answered for 9 s")

    monkeypatch.setenv("STRATAGEM_MEMORY_DIR", str(tmp_path / "memory"))
    monkeypatch.setattr(MemoryBackup, "save", save)
    backup = sg.BackupAndRestore(tmp_path / "disk", memory_save_freq=1)
    with pytest.raises(sg.errors.UnavailableError, match="worker 1 has not answered"):
        build(None).fit(X, Y, batch_size=4, epochs=2, verbose=0, callbacks=[backup])
