"""Restarts of single workers while the others run."""

from __future__ import annotations

from collections.abc import Callable

from stratagem.launch.restart.restart_count import SHORT_S

_MOST_DELAY_S = 30.0


class WorkerRestarts:
    """Decides which lost workers start again, and when.

    A worker that ran for a while starts again at once. One that keeps failing early waits twice as
    long each time, up to 30 seconds. One that was ended because it was slow does not start again
    while the others run.
    """

    def __init__(self, max_restarts: int) -> None:
        self._max_restarts = max_restarts
        self.num_restarts = 0
        self._is_exhausted = False
        self._num_short: dict[int, int] = {}
        self._due_s: dict[int, float] = {}

    def note_loss(
        self, worker: int, name: str, *, ran_s: float, now_s: float, was_slow: bool = False
    ) -> str:
        """Plans the restart of a lost worker; returns a message about it, or an empty string.

        The message that no restart is left comes once.
        """
        most = self._max_restarts
        if not most:
            return ""
        if was_slow:
            return f"Not starting {name} again while others run: it would be as slow."
        if self.num_restarts >= most:
            is_first, self._is_exhausted = not self._is_exhausted, True
            return f"Not starting {name} again: no restart of {most} is left." if is_first else ""
        self.num_restarts += 1
        delay_s = self._plan(worker, ran_s, now_s)
        after = f" after {delay_s:g} s" if delay_s else ""
        return f"Starting {name} again{after}: restart {self.num_restarts} of {most}."

    def _plan(self, worker: int, ran_s: float, now_s: float) -> float:
        """Plans a restart; returns its delay."""
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
