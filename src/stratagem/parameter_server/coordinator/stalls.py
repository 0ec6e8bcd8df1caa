"""Synchronous updates that nobody completes any more, and how they are let go on.

A server that is started again may wait for a worker that waits at another one; and where functions
are left for fewer workers than an update needs, those wait for ever.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from typing import Any

from stratagem.closing import Closing
from stratagem.errors import UnavailableError
from stratagem.parameter_server.client.client import ServerClient
from stratagem.parameter_server.transport.connection import ServerError

__all__ = ["StallWatch", "is_stalled"]

_LOOK_S = 1.0


def is_stalled(
    running: Collection[int], idle: Collection[int], num_queued: int, waiting: Collection[str]
) -> bool:
    """Returns True if every worker that could complete an update waits for it.

    Args:
        running: the workers that run a function.
        idle: those that do not, and will be there.
        num_queued: how many functions have not started that one of the idle may run.
        waiting: the names of the workers that wait at any server.
    """
    may_come = bool(idle) and num_queued > 0
    return bool(running) and not may_come and {f"worker {one}" for one in running} <= {*waiting}


class StallWatch(Closing):
    """Looks, every second, whether updates have stalled, and has them made with what is there.

    `num_stalls` counts how often that was so.

    Args:
        client: of the servers.
        workers: returns which run a function, which do not, and how many functions are queued for
            those that do not.
    """

    def __init__(
        self,
        client: ServerClient,
        workers: Callable[[], tuple[Collection[int], Collection[int], int]],
    ) -> None:
        self._client = client
        self._workers = workers
        self._is_over = threading.Event()
        self._last: Any = None
        self.num_stalls = 0
        threading.Thread(target=self._run, name="stall watch", daemon=True).start()

    def close(self) -> None:
        """Looks no more; does not wait for servers that are asked now."""
        self._is_over.set()

    def _run(self) -> None:
        while not self._is_over.wait(_LOOK_S):
            try:
                self._look()
            except (UnavailableError, ServerError):  # of servers that are gone others tell
                self._last = None

    def _look(self) -> None:
        running, idle, num_queued = self._workers()
        if not running:
            self._last = None
            return
        servers = self._client.describe()
        waiting = {name for told in servers.values() for name in told["waiting"]}
        now = [
            (told["lifetime"], told["version"], told["num_discarded"], told["waiting"])
            for told in servers.values()
        ]
        # Twice the same: what was seen once may be a moment between two answers.
        if is_stalled(running, idle, num_queued, waiting) and now == self._last:
            self.num_stalls += 1
            self._client.flush()
            now = None
        self._last = now
