"""How many steps a `PreemptionCheckpointHandler` has run, kept in the checkpoints themselves."""

from __future__ import annotations

from typing import Any

from stratagem.checkpoint.checkpoint import Checkpoint
from stratagem.checkpoint.manager import CheckpointManager

__all__ = ["RunCalls", "is_built", "restore_latest"]

_NAME = "PreemptionCheckpointHandler"


class RunCalls:
    """A count that checkpoints hold as an object with a state; counting costs nothing."""

    def __init__(self) -> None:
        self.count = 0

    def get_state(self) -> int:
        """Returns the count."""
        return self.count

    def set_state(self, state: Any) -> None:
        """Goes back to a count.

        Args:
            state: of `get_state`.
        """
        self.count = int(state)


def restore_latest(manager: CheckpointManager, calls: RunCalls) -> str | None:
    """Restores the latest checkpoint, and has the count saved with every one from now on.

    Args:
        manager: of the checkpoints, some of which may have been saved without a count.
        calls: the count; a checkpoint without one leaves it as it is.

    Returns:
        The path of what was restored; None where there was none.

    Raises:
        DataLossError: it is damaged.
        ValueError: it is of other objects, or shapes differ.
    """
    checkpoint = manager.checkpoint
    checkpoint.detach(_NAME)  # of a handler before this one
    path = manager.restore_or_initialize()
    count = calls.count
    checkpoint.attach(_NAME, calls)  # which gets the count that was saved
    if path is None:  # what was restored before is another run's
        calls.set_state(count)
    return path


def is_built(checkpoint: Checkpoint) -> bool:
    """Tells whether all objects of a checkpoint have their variables by now.

    Args:
        checkpoint: which.
    """
    try:
        checkpoint.parts()
    except ValueError:
        return False
    return True
