"""Control messages of a group in its process 0: its code, with other processes simulated."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import socket
import time
import unittest.mock
from collections.abc import Callable, Generator
from typing import Any

from benchmarks.growth.costs.serving import Answer, serve_costs
from stratagem.group import hub as hub_module
from stratagem.group.authentication.connections import frame
from stratagem.group.authentication.secret import Credentials
from stratagem.group.hub import MEMBER, Hub
from stratagem.group.verdict import GroupLimits

__all__ = ["measure"]

_LIMITS = GroupLimits(join_s=1e6, peer_s=1e6, stuck_s=1e6, barrier_s=1e6)
_FACTS = {
    "host": "host",
    "pid": 1,
    "address": "10.0.0.1",
    "same": {"the cluster": "that of host", "jax": "0.10", "Python": "3.11"},
}
_LONG_AGO_S = 10.0
_NUM_TIMES = 3


class _Wire:
    """Both ends of a connection without a network. Process 0 reads `reader` and calls the rest."""

    def __init__(self, *, counts: bool = False) -> None:
        self._counts = counts
        self.reader = asyncio.StreamReader()
        self.num_answers = 0
        self.last = b""

    def say(self, data: bytes) -> None:
        """Sends a frame to process 0."""
        self.reader.feed_data(data)

    def write(self, data: bytes) -> None:
        """Receives a frame of process 0."""
        self.last = data
        if self._counts:
            self.num_answers += data.count(b'"leaving"')

    def get_extra_info(self, name: str) -> tuple[str, int]:
        """Returns an address."""
        return ("10.0.0.2" if name == "peername" else "10.0.0.1", 1)

    async def drain(self) -> None:
        """Nothing is ever pending."""

    def setsockopt(self, *_: object) -> None:
        """Accepts any option, as a socket."""

    def close(self) -> None:
        """Ends the connection."""

    @property
    def transport(self) -> _Wire:
        return self

    def abort(self) -> None:
        """Ends the connection, as a transport."""


async def _open_streams(connection: _Wire, *_: object, **__: object) -> tuple[Any, _Wire]:
    return connection.reader, connection


def measure(size: int, *, is_smallest: bool) -> Answer:
    """Returns the CPU seconds of process 0 in a group of `size` processes."""
    num_times = 1 if is_smallest else _NUM_TIMES
    with unittest.mock.patch.object(hub_module, "open_streams", _open_streams):
        several = [asyncio.run(_costs(size)) for _ in range(num_times)]
    return {"ours": {name: min(one[name] for one in several) for name in several[0]}}


async def _costs(size: int) -> dict[str, float]:
    costs: dict[str, float] = {}

    @contextlib.contextmanager
    def counted(name: str) -> Generator[None]:
        gc.collect()  # what is left of earlier ones
        begun_s = time.thread_time()
        yield
        costs[name] = time.thread_time() - begun_s

    labels = [f"worker {index} (host{index}:2222)" for index in range(size)]
    hub = Hub(labels, _LIMITS, 0, Credentials(), 1e6)
    wires = [_Wire(counts=index == 0) for index in range(size)]
    hellos = [_hello(index, size) for index in range(size)]
    with counted("join_s"):
        for index, wire in enumerate(wires):
            hub.serve(_as_socket(wire), f"{MEMBER} {index}")
            wire.say(hellos[index])
        await _until(wires, "welcome")
    in_step = _beat("step", 1)
    for wire in wires:
        wire.say(in_step)
    await _settle(lambda: all(one.position.step for one in hub._members))
    for member in hub._members:
        member.moved_at -= _LONG_AGO_S
    with counted("judge_s"):
        hub._judge()
    barrier = frame(_exchange())
    with counted("barrier_s"):
        for wire in wires:
            wire.say(barrier)
        await _until(wires, "exchanged")
    with counted("agreement_s"):
        wires[-1].say(frame({"kind": "announce", "topic": "leaving", "numbers": [1]}))
        await _until(wires, "announced")
        first, *_ = wires
        first.num_answers = 0
        answer = frame({"kind": "announce", "topic": "leaving", "numbers": [1, 20, 0]})
        for wire in wires:
            wire.say(answer)
        await _settle(lambda: first.num_answers == size)  # all receive the same
    with counted("verdict_s"):
        wires[-1].reader.feed_eof()
        await _until(wires[:-1], "verdict")
        for wire in wires[:-1]:  # they end, too
            wire.reader.feed_eof()
        await _settle(lambda: all(member.writer is None for member in hub._members))
    return costs


def _hello(index: int, count: int) -> bytes:
    return frame({"kind": "hello", "process_id": index, "num_processes": count, "facts": _FACTS})


def _beat(position: str, step: int) -> bytes:
    told = {"position": position, "name": "train", "step": step, "moves": 1, "calls": 0}
    return frame({"kind": "beat", **told})


def _exchange() -> dict[str, Any]:
    return {
        "kind": "exchange",
        "stream": "main",
        "number": 0,
        "name": "barrier",
        "value": None,
        "limit_s": None,
        "setting": "STRATAGEM_BARRIER_TIMEOUT_S",
    }


def _as_socket(wire: Any) -> socket.socket:
    return wire


async def _until(wires: list[_Wire], kind: str) -> None:
    """Waits until the last message to each process is of a kind."""
    start = json.dumps({"kind": kind}, separators=(",", ":")).encode()[:-1]
    await _settle(lambda: all(wire.last[4:].startswith(start) for wire in wires))


async def _settle(is_over: Callable[[], bool]) -> None:
    while not is_over():
        await asyncio.sleep(0)


if __name__ == "__main__":
    serve_costs(measure)
