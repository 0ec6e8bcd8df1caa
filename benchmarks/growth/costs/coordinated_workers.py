"""A coordinator that keeps many workers busy, which are simulated in another process.

They speak as workers do, each at an address of its own, and end each function at once.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import stratagem as sg  # isort: skip - before keras, because it selects the JAX backend

from benchmarks.growth.costs.serving import Answer, cpu_and_elapsed_s, serve_costs
from stratagem.group.transport.endpoints import ClusterKeys
from stratagem.group.transport.listener import Listener, Request
from stratagem.group.transport.wire import Message
from stratagem.parameter_server.cluster_plan import CoordinatorOptions, RemoteStateStrategy
from stratagem.parameter_server.coordinator.shipping import Ended, calls_in, pack_ended
from stratagem.parameter_server.keras.pickling import pack_object
from stratagem.parameter_server.server.shards import ASYNCHRONOUS
from stratagem.parameter_server.strategy import coordinator_parts

__all__ = ["measure"]

_NUM_CLOSURES = 20_000
_NUM_TIMES = 3
_FUNCTION_S = 1e-5
_RESULT = pack_object(None, lambda value: None)


def measure(size: int, *, is_smallest: bool) -> Answer:
    """Returns the times of 20,000 functions on `size` workers: scheduled, run and joined."""
    num_closures = 200 if is_smallest else _NUM_CLOSURES
    parts = coordinator_parts(_Cluster(size), None, ASYNCHRONOUS, 60.0)
    with RemoteStateStrategy(parts, CoordinatorOptions(start_delay_s=0.0)) as strategy:
        coordinator = sg.coordinator.ClusterCoordinator(strategy)

        def run(num: int) -> None:
            for _ in range(num):
                coordinator.schedule(_nothing)
            coordinator.join()

        run(20 * size)  # each worker joins and receives the function
        times = [cpu_and_elapsed_s(lambda: run(num_closures)) for _ in range(_NUM_TIMES)]
        cpu_s, elapsed_s = zip(*times, strict=True)
        return {"ours": {"coordinator_s": min(cpu_s), "all_s": min(elapsed_s)}}


def _nothing() -> None:
    pass


class _Cluster:
    """A cluster without servers, and with simulated workers."""

    server_addresses: tuple[str, ...] = ()

    def __init__(self, num_workers: int) -> None:
        self.keys = ClusterKeys.make()
        self._num_workers = num_workers

    def locate_server(self, server: int) -> None:
        """Is not called: there is none."""

    def report_moves_to(self, on_moved: Callable[[int, str], None]) -> None:
        """Does nothing: no server moves."""

    def start_workers(self) -> _Workers:
        """Starts the workers."""
        return _Workers(self.keys, self._num_workers)

    def close(self) -> None:
        """Does nothing."""


class _Workers:
    """Simulated workers in a process of their own."""

    def __init__(self, keys: ClusterKeys, num_workers: int) -> None:
        command = [sys.executable, "-m", __spec__.name, "--workers", str(num_workers)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{keys.secret.hex()}\n")
        self._process.stdin.flush()
        self.addresses: list[str] = json.loads(self._process.stdout.readline())

    def watch(self, *reports: Any) -> None:
        """Does nothing: no worker is lost."""

    def close(self) -> None:
        """Ends the process."""
        self._process.communicate()


def _serve_workers(num_workers: int) -> None:
    """Answers as workers until stdin ends."""
    keys = ClusterKeys(bytes.fromhex(sys.stdin.readline()))
    with contextlib.ExitStack() as stack:
        listeners = [
            stack.enter_context(
                Listener(keys, _answer, num_threads=1, at_once={"join", "function", "run"})
            )
            for _ in range(num_workers)
        ]
        print(json.dumps([one.address for one in listeners]), flush=True)
        sys.stdin.read()


def _answer(request: Request) -> None:
    message = request.message
    if message.kind != "run":
        request.answer(Message("ok"))
        return
    ended = [Ended(_RESULT, _FUNCTION_S) for _ in calls_in(message)]
    request.answer(pack_ended(ended, {"losses": {}, "num_repeated": 0, "built": []}))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--workers"]:
        _serve_workers(int(sys.argv[2]))
    else:
        serve_costs(measure)
