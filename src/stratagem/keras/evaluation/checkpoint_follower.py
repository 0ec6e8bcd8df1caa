"""Follows a folder of checkpoints: which are new and complete, look by look."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from stratagem.keras.evaluation.checkpoint_files import Checkpoint, CheckpointFormat

__all__ = ["CheckpointFollower"]

# How long a file may stay as it is and not be whole. Another machine's writes can take a minute to
# be seen on a network file system.
PATIENCE_S = 75.0


class CheckpointFollower:
    """Record of the checkpoints found in a folder, and of those already evaluated.

    Nothing is read here, and no time passes: whoever looks says what time it is.

    Args:
        checkpoint_format: finds the checkpoints.
        folder: where.
        now_s: the time, on any clock.
    """

    def __init__(self, checkpoint_format: CheckpointFormat, folder: Path, now_s: float) -> None:
        self._format = checkpoint_format
        self._folder = folder
        self._found: Sequence[Checkpoint] = ()
        self._done: dict[Path, Checkpoint] = {}
        self._unreadable: dict[Path, tuple[Checkpoint, float]] = {}
        self._times_done: Counter[Path] = Counter()
        self.changed_at_s = now_s

    @property
    def num_done(self) -> int:
        """Number of checkpoints that were processed.

        A name counts once, because training that starts again writes some of them again; but as
        often as the one name was written, where all are written under one.
        """
        return max(len(self._times_done), *self._times_done.values(), 0)

    def look(self, now_s: float, *, is_last: bool = False) -> list[Checkpoint]:
        """Returns which checkpoints are complete and not done with.

        Args:
            now_s: the time.
            is_last: nobody writes any more: those that could not be read are tried once more.

        Returns:
            Those that have not changed since the look before, the oldest first.
        """
        before, self._found = self._found, self._format.find(self._folder)
        if self._found != before:
            self.changed_at_s = now_s
        return [
            one
            for one in self._found
            if one in before
            and self._done.get(one.path) != one
            and (is_last or self._may_try(one, now_s))
        ]

    def finish(self, checkpoint: Checkpoint) -> None:
        """Notes that a checkpoint is done with: evaluated, or passed over.

        Args:
            checkpoint: of the last look.
        """
        self._done[checkpoint.path] = checkpoint
        self._times_done[checkpoint.path] += 1

    def postpone(self, checkpoint: Checkpoint, now_s: float) -> bool:
        """Notes that a checkpoint cannot be read, so that it is left alone until it changes.

        Args:
            checkpoint: of the last look.
            now_s: the time.

        Returns:
            Whether to go on waiting for it.
        """
        known = self._unreadable.get(checkpoint.path)
        if known is None or known[0] != checkpoint:
            self._unreadable[checkpoint.path] = checkpoint, now_s
            return True
        return now_s - known[1] < PATIENCE_S

    def has_newer(self, checkpoint: Checkpoint) -> bool:
        """Returns True if there is a newer checkpoint.

        Args:
            checkpoint: of the last look.

        Returns:
            True if another one, complete or not, is newer.
        """
        return any(one.age > checkpoint.age for one in self._found if one.path != checkpoint.path)

    def _may_try(self, checkpoint: Checkpoint, now_s: float) -> bool:
        known = self._unreadable.get(checkpoint.path)
        return known is None or known[0] != checkpoint or now_s - known[1] >= PATIENCE_S
