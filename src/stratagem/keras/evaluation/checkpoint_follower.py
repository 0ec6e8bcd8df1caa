"""Record of a folder's checkpoints: new, complete, evaluated or unreadable."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from stratagem.keras.evaluation.checkpoint_files import CheckpointFile, CheckpointFormat

# Limit on an unchanged, incomplete file. On a network file system, writes of another machine can
# take a minute to appear.
PATIENCE_S = 75.0


class CheckpointFollower:
    """Record of the checkpoints found in a folder, and of those already evaluated.

    It reads no files and no clock: callers pass the time `now_s`, in seconds of any clock.
    """

    def __init__(self, checkpoint_format: CheckpointFormat, folder: Path, now_s: float) -> None:
        self._format = checkpoint_format
        self._folder = folder
        self._found: Sequence[CheckpointFile] = ()
        self._done: dict[Path, CheckpointFile] = {}
        self._unreadable: dict[Path, tuple[CheckpointFile, float]] = {}
        self._times_done: Counter[Path] = Counter()
        self.changed_at_s = now_s

    @property
    def num_done(self) -> int:
        """Number of processed checkpoints.

        A name counts once, because restarted training rewrites files, unless all share one name:
        then each write counts.
        """
        return max(len(self._times_done), *self._times_done.values(), 0)

    def look(self, now_s: float, *, is_last: bool = False) -> list[CheckpointFile]:
        """Scans the folder; returns pending checkpoints unchanged since the last scan.

        They are sorted, oldest first. `is_last` means that writing has ended: unreadable ones are
        tried once more.
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

    def finish(self, checkpoint: CheckpointFile) -> None:
        """Marks a checkpoint as evaluated or skipped."""
        self._done[checkpoint.path] = checkpoint
        self._times_done[checkpoint.path] += 1

    def postpone(self, checkpoint: CheckpointFile, now_s: float) -> bool:
        """Skips an unreadable checkpoint until it changes; returns False once patience runs out."""
        known = self._unreadable.get(checkpoint.path)
        if known is None or known[0] != checkpoint:
            self._unreadable[checkpoint.path] = checkpoint, now_s
            return True
        return now_s - known[1] < PATIENCE_S

    def has_newer(self, checkpoint: CheckpointFile) -> bool:
        """Returns True if another checkpoint, complete or not, is newer."""
        return any(one.age > checkpoint.age for one in self._found if one.path != checkpoint.path)

    def _may_try(self, checkpoint: CheckpointFile, now_s: float) -> bool:
        known = self._unreadable.get(checkpoint.path)
        return known is None or known[0] != checkpoint or now_s - known[1] >= PATIENCE_S
