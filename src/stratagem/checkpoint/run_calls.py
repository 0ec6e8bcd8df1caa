"""Step count of a `PreemptionCheckpointHandler`, stored in the checkpoints themselves."""

from __future__ import annotations

from stratagem.checkpoint.checkpoint import Checkpoint
from stratagem.checkpoint.manager import CheckpointManager

_NAME = "PreemptionCheckpointHandler"


class RunCalls:
    """Step count with a state that checkpoints can store."""

    def __init__(self) -> None:
        self.count = 0

    def get_state(self) -> int:
        """Returns the count."""
        return self.count

    def set_state(self, state: int) -> None:
        """Restores a count."""
        self.count = int(state)


def restore_latest(manager: CheckpointManager, calls: RunCalls) -> str | None:
    """Restores the latest checkpoint, and adds the count to all checkpoints saved from now on.

    Checkpoints without a count leave it unchanged. Returns the path, or None without a checkpoint.
    """
    checkpoint = manager.checkpoint
    checkpoint.detach(_NAME)  # the count of an earlier handler
    path = manager.restore_or_initialize()
    count = calls.count
    checkpoint.attach(_NAME, calls)  # restores the saved count
    if path is None:  # an earlier restore belongs to another run
        calls.set_state(count)
    return path


def is_built(checkpoint: Checkpoint) -> bool:
    """True if all objects of a checkpoint have their variables."""
    try:
        checkpoint.parts()
    except ValueError:
        return False
    return True
