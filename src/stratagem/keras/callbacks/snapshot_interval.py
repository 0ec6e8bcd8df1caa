"""Interval at which `fit` saves its state in memory."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque

from stratagem.group import current_group

__all__ = ["AUTO", "KeepingPace"]

AUTO = "auto"
_SHARE = 0.005
# So many are measured before the first decision, and remembered for the next ones.
_NUM_MEASURED = 16
# So many calls lie between two decisions: all processes wait for each other's numbers.
_NUM_BETWEEN = 1000


class KeepingPace:
    """Says after which batches the state is kept, on all processes after the same.

    Of itself it is kept as often as that takes a two-hundredth of the time: where keeping takes as
    long as a step, a killed process has lost two hundred at most; where steps are long, one.

    Args:
        num_batches: after how many; "auto" for as often as that.
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
        """Counts batches that are done, and says whether to keep the state. On every process.

        Args:
            num_batches: of the call of Keras's train function.
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

    def kept(self, cost_s: float) -> None:
        """Notes that the state was kept.

        Args:
            cost_s: how long that took.
        """
        self._costs_s.append(cost_s)
        if self._mark_s is not None:
            self._mark_s += cost_s

    def end_epoch(self) -> None:
        """Notes that the state is kept without being due; may decide anew. On every process."""
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
        # The slowest decides.
        everyone = [own] if group is None else group.exchange("BackupAndRestore's pace", own)
        self.num_batches = max(everyone)
