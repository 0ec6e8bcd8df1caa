"""Restart policy of a process: restart delays and limits, without side effects."""

from __future__ import annotations

# Consecutive failed starts before giving up.
MAX_FAILED_STARTS = 5
# A process that ran this long does not fail at its start, so delays start over.
_STABLE_S = 3.0
_FIRST_DELAY_S = 0.5
_MAX_DELAY_S = 30.0


class Restarts:
    """Restart delays of one process: none at first, then exponential backoff.

    `max_restarts=-1` sets no limit.
    """

    def __init__(self, max_restarts: int = -1) -> None:
        self._max_restarts = max_restarts
        self._num_losses = 0
        self._num_in_a_row = 0
        self._num_failed_starts = 0

    def started(self) -> None:
        """Records a successful start."""
        self._num_failed_starts = 0

    def delay_after_loss_s(self, lived_s: float) -> float | None:
        """Returns the delay before a restart, after a run of `lived_s`; None to give up."""
        self._num_losses += 1
        if lived_s >= _STABLE_S:
            self._num_in_a_row = 0
        if 0 <= self._max_restarts < self._num_losses:
            return None
        return self._next_delay_s()

    def delay_after_failed_start_s(self) -> float | None:
        """Returns the delay before the next start, after a failed one; None to give up."""
        self._num_failed_starts += 1
        if self._num_failed_starts >= MAX_FAILED_STARTS:
            return None
        return self._next_delay_s()

    def _next_delay_s(self) -> float:
        doublings = self._num_in_a_row - 1
        self._num_in_a_row += 1
        return 0.0 if doublings < 0 else min(_MAX_DELAY_S, _FIRST_DELAY_S * 2.0**doublings)
