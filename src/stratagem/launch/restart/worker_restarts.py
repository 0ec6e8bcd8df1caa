"""Restarts of single workers while the others run."""

from __future__ import annotations

from collections.abc import Callable

from stratagem.launch.restart.restart_count import SHORT_S

__all__ = ["WorkerRestarts"]

_MOST_DELAY_S = 30.0


class WorkerRestarts:
    """Decides which lost workers start again, and when.

    A worker that ran for a while starts again at once. One that keeps failing early waits twice as
    long each time, up to 30 seconds.
    """

    def __init__(self, max_restarts: int) -> None:
        self._max_restarts = max_restarts
        self.num_restarts = 0
        self._num_short: dict[int, int] = {}
        self._due_s: dict[int, float] = {}

    def note_loss(self, worker: int, *, ran_s: float, now_s: float) -> float | None:
        """Plans the restart of a lost worker; returns the delay, or None if no restart is left."""
        if self.num_restarts >= self._max_restarts:
            return None
        self.num_restarts += 1
        num_short = self._num_short.get(worker, 0) + 1 if ran_s < SHORT_S else 0
        self._num_short[worker] = num_short
        delay_s = min(_MOST_DELAY_S, 2.0 ** (num_short - 1)) if num_short else 0.0
        self._due_s[worker] = now_s + delay_s
        return delay_s

    def take_due(self, now_s: float, is_gone: Callable[[int], bool]) -> list[int]:
        """Returns the workers that start now, once; `is_gone` is True if nothing of one is left."""
        due = [one for one, at_s in self._due_s.items() if at_s <= now_s and is_gone(one)]
        for worker in due:
            del self._due_s[worker]
        return due
