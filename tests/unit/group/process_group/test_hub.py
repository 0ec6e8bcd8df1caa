"""Control messages of process 0: their bytes grow as the number of processes does."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import pytest

from stratagem.group.authentication.secret import Credentials
from stratagem.group.hub import Hub
from stratagem.group.protocol import frame, read_frame
from stratagem.group.verdict import GroupLimits
from tests.unit.group.process_group.members import hello

_LIMITS = GroupLimits(join_s=600, peer_s=600, stuck_s=600, barrier_s=600)
_BARRIER = {
    "kind": "exchange",
    "stream": "main",
    "number": 0,
    "name": "barrier",
    "value": None,
    "limit_s": 20.0,
    "setting": "S",
}


class _Wire:
    """The connection of one process, both ends."""

    def __init__(self) -> None:
        self.reader = asyncio.StreamReader()
        self.received = asyncio.StreamReader()
        self.num_bytes = 0

    def write(self, data: bytes) -> None:
        self.num_bytes += len(data)
        self.received.feed_data(data)

    def get_extra_info(self, name: str) -> tuple[str, int]:
        return "127.0.0.1", len(name)

    async def drain(self) -> None:
        pass


async def _joined(hub: Any, count: int) -> list[_Wire]:
    wires = [_Wire() for _ in range(count)]
    for index, wire in enumerate(wires):
        hub._hold_reference(asyncio.create_task(_serve(hub, hello(index, count), wire)))
    for wire in wires:
        assert await _next(wire, "welcome") == {"kind": "welcome", "address": "127.0.0.1"}
    return wires


async def _serve(hub: Any, said: dict[str, Any], wire: _Wire) -> None:
    with contextlib.suppress(ConnectionError):
        await hub._serve_member(said, wire.reader, wire)


async def _next(wire: _Wire, kind: str) -> dict[str, Any]:
    message = await asyncio.wait_for(read_frame(wire.received), 120)
    assert message["kind"] == kind
    return message


async def _join(wires: list[_Wire]) -> None:
    """Nothing more than joining."""


async def _barrier(wires: list[_Wire]) -> None:
    for wire in wires:
        wire.reader.feed_data(frame(_BARRIER))
    for wire in wires:
        assert (await _next(wire, "exchanged"))["runs"] == [[None, len(wires)]]


async def _end(wires: list[_Wire]) -> None:
    for wire in wires:
        wire.reader.feed_data(frame({"kind": "gone"}))
    for wire in wires:
        await _next(wire, "gone")
        wire.reader.feed_eof()


async def _lose_one(wires: list[_Wire]) -> None:
    wires[-1].reader.feed_eof()
    for wire in wires[:-1]:
        assert "died" in (await _next(wire, "verdict"))["message"]
        wire.reader.feed_eof()


@pytest.mark.parametrize("act", [_join, _barrier, _end, _lose_one])
def test_bytes_to_all_grow_in_proportion(act: Callable[[list[_Wire]], Any]) -> None:
    async def num_bytes(count: int) -> int:
        labels = [f"worker {index}" for index in range(count)]
        wires = await _joined(Hub(labels, _LIMITS, 0, Credentials(), 20), count)
        await act(wires)
        return sum(wire.num_bytes for wire in wires)

    small, large = asyncio.run(num_bytes(100)), asyncio.run(num_bytes(400))
    assert large < 4.4 * small


def test_announcements_at_one_time_are_one_message_to_each_and_come_before_what_follows() -> None:
    async def act() -> None:
        hub = Hub(["a", "b", "c"], _LIMITS, 0, Credentials(), 20)
        wires = await _joined(hub, 3)
        for index, wire in enumerate(wires):
            announcement = {"kind": "announce", "topic": "t", "numbers": [index]}
            wire.reader.feed_data(frame(announcement) + frame(_BARRIER))
        for wire in wires:
            said = await _next(wire, "announced")
            assert said["announcements"] == [["t", 0, [0]], ["t", 1, [1]], ["t", 2, [2]]]
            await _next(wire, "exchanged")

    asyncio.run(act())


def test_missing_processes_are_told_while_all_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stratagem.group.hub._JUDGE_INTERVAL_S", 0.01)

    async def act() -> None:
        hub: Any = Hub([f"worker {index}" for index in range(200)], _LIMITS, 0, Credentials(), 20)
        wire = _Wire()
        hub._hold_reference(asyncio.create_task(_serve(hub, hello(3, 200), wire)))
        hub.start()
        while (said := await read_frame(wire.received))["kind"] != "progress":
            pass
        assert said["num_missing"] == 199
        assert said["missing"].startswith("worker 0, worker 1, worker 2, worker 4, worker 5, ")
        assert said["missing"].endswith("worker 64 and 135 more")
        for task in hub._tasks:
            task.cancel()

    asyncio.run(act())
