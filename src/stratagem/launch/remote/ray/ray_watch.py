"""Watch over the Ray processes that this process depends on: the head's GCS and its own raylet.

Ray waits for a lost raylet without end, and ends a process without an explanation a minute after it
lost the GCS.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from stratagem import environment
from stratagem.closing import Closing
from stratagem.errors import UnavailableError
from stratagem.launch.remote.ray.ray_cluster import load_ray
from stratagem.launch.remote.ray.ray_exit import mark_ray_lost
from stratagem.launch.remote.ray.services import probe
from stratagem.messages import explain

_POLL_S = 1.0


class RayWatch(Closing):
    """Calls `on_lost` once, in its own thread, if one of `addresses` does not answer in time.

    They are by the name of the Ray process. It is lost if it gives no answer for
    `STRATAGEM_PEER_TIMEOUT_S`, or if its port refuses connections for half of that: it has ended
    then, but may be restarted. So it is noticed before the servers that ended with it.
    """

    def __init__(
        self, addresses: Mapping[str, str], on_lost: Callable[[UnavailableError], None]
    ) -> None:
        self._addresses = dict(addresses)
        self._on_lost = on_lost
        self._limit_s = float(environment.read("peer_timeout_s"))
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stratagem-ray", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops watching."""
        self._is_closed.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _watch(self) -> None:
        answered_s = dict.fromkeys(self._addresses, time.monotonic())
        while not self._is_closed.wait(_POLL_S):
            for name, address in self._addresses.items():
                answer = probe(address)
                now_s = time.monotonic()
                if answer == "there":
                    answered_s[name] = now_s
                    continue
                limit_s = self._limit_s / 2 if answer == "refused" else self._limit_s
                if now_s - answered_s[name] > limit_s and not self._is_closed.is_set():
                    mark_ray_lost()
                    self._on_lost(self._error(name, address, answer, limit_s))
                    return

    def _error(self, name: str, address: str, answer: str, limit_s: float) -> UnavailableError:
        return UnavailableError(
            explain(
                f"Ray's {name} at {address} has not answered for {limit_s:g} s: {answer}. It was "
                "killed, or its machine or network failed.",
                expected=f"an answer within {self._limit_s:g} s (STRATAGEM_PEER_TIMEOUT_S), or "
                "half of that from a port that refuses connections.",
                fix="start the Ray cluster again, then the program: it resumes from its last "
                "checkpoint (sg.BackupAndRestore, sg.CheckpointManager).",
                code="SG514",
            )
        )


def watched_addresses() -> dict[str, str]:
    """Returns the addresses of the GCS and of this machine's raylet; call it while both live."""
    ray = load_ray()
    context: Any = ray.get_runtime_context()
    found = {"GCS": context.gcs_address}
    for node in ray.nodes():
        if node["NodeID"] == context.get_node_id():
            found["raylet"] = f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}"
    return found
