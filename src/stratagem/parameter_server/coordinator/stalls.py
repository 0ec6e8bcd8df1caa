"""Watch for synchronous updates that can no longer complete.

A restarted server may wait for a worker that waits at another server. Or the remaining functions
occupy fewer workers than an update needs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from typing import Any

from stratagem.closing import Closing
from stratagem.parameter_server.client.client import ServerClient

_LOOK_S = 1.0


def is_stalled(
    running: Collection[int], idle: Collection[int], num_queued: int, waiting: Collection[str]
) -> bool:
    """Returns True if every worker that could complete an update waits for it.

    `running` and `idle` are indices of available workers, `num_queued` counts functions that idle
    ones may run, and `waiting` holds the names of workers that wait at a server.
    """
    may_come = bool(idle) and num_queued > 0
    return bool(running) and not may_come and {f"worker {one}" for one in running} <= {*waiting}


class StallWatch(Closing):
    """Checks for stalled updates once per second and applies them with the gradients that arrived.

    `workers` returns the workers that run a function, the available idle ones, and the number of
    functions queued for the latter. `num_stalls` counts the stalls.
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
        """Stops the checks; does not wait for one in progress."""
        self._is_over.set()

    def _run(self) -> None:
        while not self._is_over.wait(_LOOK_S):
            try:
                self._look()
            except Exception:  # noqa: BLE001 - other code reports lost servers; it looks again
                self._last = None

    def _look(self) -> None:
        running, idle, num_queued = self._workers()
        if not running:
            self._last = None
            return
        servers = self._client.describe()
        waiting = {name for state in servers.values() for name in state["waiting"]}
        now = [
            (state["lifetime"], state["version"], state["num_discarded"], state["waiting"])
            for state in servers.values()
        ]
        # Stalled twice in the same state: a single look may fall between two answers.
        if is_stalled(running, idle, num_queued, waiting) and now == self._last:
            self.num_stalls += 1
            self._client.flush()
            now = None
        self._last = now
