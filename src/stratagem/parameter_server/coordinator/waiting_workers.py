"""Threads of workers that wait for closures, each woken alone.

Waking all threads for each closure would cost the square of the number of workers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class WaitingWorkers:
    """Workers that wait for closures. Call it while holding `lock`.

    Idle workers come before busy ones, which already run a closure.
    """

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock
        self._bells: dict[int, threading.Condition] = {}
        self._idle: dict[int, None] = {}
        self._busy: dict[int, Callable[[], bool]] = {}
        self._coming: set[int] = set()  # woken by `wake_one`

    def wait(self, worker: int, is_busy: Callable[[], bool]) -> None:
        """Releases the lock until the worker is woken."""
        if is_busy():
            self._busy[worker] = is_busy
        else:
            self._idle[worker] = None
        if worker not in self._bells:
            self._bells[worker] = threading.Condition(self._lock)
        self._bells[worker].wait()
        self._coming.discard(worker)

    def wake(self, worker: int) -> None:
        """Wakes a worker, if it waits."""
        is_waiting = worker in self._idle or worker in self._busy
        self._idle.pop(worker, None)
        self._busy.pop(worker, None)
        if is_waiting:
            self._bells[worker].notify_all()

    def wake_one(self, *, may_be_busy: bool) -> None:
        """Wakes one worker, unless one is about to return from its wait.

        That is the last idle worker, else, if it may be busy, the last busy one: short functions
        then keep few workers busy with many at once.
        """
        if self._coming:
            return
        workers = self._idle or (self._busy if may_be_busy else None)
        if workers:
            worker = next(reversed(workers))
            self._coming.add(worker)
            self.wake(worker)

    def wake_all(self) -> None:
        """Wakes all workers."""
        for worker in [*self._idle, *self._busy]:
            self.wake(worker)

    def note_finished(self, worker: int) -> None:
        """Counts a waiting worker as idle if it has nothing left to run."""
        is_busy = self._busy.get(worker)
        if is_busy is not None and not is_busy():
            del self._busy[worker]
            self._idle[worker] = None
