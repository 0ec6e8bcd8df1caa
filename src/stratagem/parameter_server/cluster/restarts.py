"""Policy of restarts of a process: a pure choice."""

from __future__ import annotations

__all__ = ["MAX_FAILED_STARTS", "Restarts"]

# A process that fails so often without ever having started never will.
MAX_FAILED_STARTS = 5
# One that has run for so long does not fail from its start on.
_STABLE_S = 3.0
_FIRST_DELAY_S = 0.5
_MAX_DELAY_S = 30.0


class Restarts:
    """The restarts of one process. The first is at once, those after it wait longer and longer.

    Args:
        max_restarts: how many there may be; -1 for any number.
    """

    def __init__(self, max_restarts: int = -1) -> None:
        self._max_restarts = max_restarts
        self._num_losses = 0
        self._num_in_a_row = 0
        self._num_failed_starts = 0

    def started(self) -> None:
        """Notes that the process has started."""
        self._num_failed_starts = 0

    def delay_after_loss_s(self, lived_s: float) -> float | None:
        """Returns how long to wait with the next start.

        Args:
            lived_s: how long the process had run.

        Returns:
            Seconds; None for no start any more.
        """
        self._num_losses += 1
        if lived_s >= _STABLE_S:
            self._num_in_a_row = 0
        if 0 <= self._max_restarts < self._num_losses:
            return None
        return self._next_delay_s()

    def delay_after_failed_start_s(self) -> float | None:
        """Returns how long to wait with the next start, after one that has failed.

        Returns:
            Seconds; None for no start any more.
        """
        self._num_failed_starts += 1
        if self._num_failed_starts >= MAX_FAILED_STARTS:
            return None
        return self._next_delay_s()

    def _next_delay_s(self) -> float:
        doublings = self._num_in_a_row - 1
        self._num_in_a_row += 1
        return 0.0 if doublings < 0 else min(_MAX_DELAY_S, _FIRST_DELAY_S * 2.0**doublings)
