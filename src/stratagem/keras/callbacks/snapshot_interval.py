"""Interval between snapshots of `fit`'s state in memory."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque

from stratagem.group.current import current_group

AUTO = "auto"
_SHARE = 0.005
# Number of latest batches that a decision is based on, and of calls before the first.
_NUM_MEASURED = 16
# Calls between two decisions, at which all processes wait for each other.
_NUM_BETWEEN = 1000


class SnapshotInterval:
    """Selects the batches after which state is saved, the same on all processes.

    `num_batches` is the interval. "auto" limits saving to 0.5% of the training time: if saving
    takes as long as a step, a killed process loses 200 steps at most; if steps are long, one.
    """

    def __init__(self, num_batches: int | str) -> None:
        self._is_auto = num_batches == AUTO
        self.num_batches = 1 if self._is_auto else int(num_batches)
        self._num_waiting = self._num_calls = 0
        self._is_first = True
        self._mark_s: float | None = None
        self._batches_s: deque[float] = deque(maxlen=_NUM_MEASURED)
        self._costs_s: deque[float] = deque(maxlen=_NUM_MEASURED)

    def is_due(self, num_batches: int) -> bool:
        """Counts `num_batches` completed batches; returns True if a snapshot is due.

        Call it on every process.
        """
        now_s = time.monotonic()
        if self._mark_s is not None:
            self._batches_s.append((now_s - self._mark_s) / num_batches)
        self._mark_s = now_s
        self._num_waiting += num_batches
        self._num_calls += 1
        if self._is_first and self._num_calls == _NUM_MEASURED:
            self._agree()
        is_due = self._num_waiting >= self.num_batches
        if is_due:
            self._num_waiting = 0
        return is_due

    def note(self, cost_s: float) -> None:
        """Records a snapshot that took `cost_s` seconds."""
        self._costs_s.append(cost_s)
        if self._mark_s is not None:
            self._mark_s += cost_s

    def end_epoch(self) -> None:
        """Resets the count after the snapshot of an epoch's end; may choose a new interval.

        Call it on every process.
        """
        self._num_waiting, self._mark_s = 0, None
        if self._num_calls >= _NUM_BETWEEN:
            self._agree()

    def _agree(self) -> None:
        self._is_first, self._num_calls = False, 0
        if not self._is_auto:
            return
        own = 1
        if self._batches_s and self._costs_s:
            batch_s, cost_s = map(statistics.median, (self._batches_s, self._costs_s))
            own = max(1, math.ceil(cost_s / (_SHARE * batch_s))) if batch_s > 0 else 1
        group = current_group()
        # The longest interval applies to all.
        everyone = [own] if group is None else group.exchange("BackupAndRestore's pace", own)
        self.num_batches = max(everyone)
