"""State of one `fit` that `BackupAndRestore` backs up."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from stratagem.checkpoint.in_memory import MemoryBackup
from stratagem.checkpoint.manager import CheckpointManager
from stratagem.checkpoint.options import CheckpointOptions
from stratagem.checkpoint.preemption_exit import PreemptionExit
from stratagem.keras.callbacks.fit_position import FitPosition
from stratagem.keras.callbacks.snapshot_interval import SnapshotInterval


class BackupProgress:
    """Checkpointed state of a training outside its variables."""

    def __init__(self) -> None:
        self.current: Callable[[], dict[str, Any]] = dict
        self.restored: dict[str, Any] = {}

    def get_state(self) -> dict[str, Any]:
        """Returns the current state."""
        return self.current()

    def set_state(self, state: dict[str, Any]) -> None:
        """Stores a restored state."""
        self.restored = state


@dataclasses.dataclass(frozen=True)
class BackupRun:
    """Backups of one `fit`, and the state that they hold.

    `memory` is None if nothing is saved in memory, and `leaving` if notices are ignored.
    """

    manager: CheckpointManager
    memory: MemoryBackup | None
    interval: SnapshotInterval
    leaving: PreemptionExit | None
    progress: BackupProgress
    position: FitPosition

    def restore(self) -> Callable[[], object] | None:
        """Restores the newest state; returns a function that restores it again, or None if none."""
        manager, memory = self.manager, self.memory
        if memory is not None and memory.restore() is not None:
            return memory.restore
        path = manager.restore_or_initialize(skip_damaged=True)
        if path is None:
            return None
        exactly = CheckpointOptions(restore_components=True)
        return lambda: manager.checkpoint.restore(path, exactly)
