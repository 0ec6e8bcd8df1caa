"""Parsers that read sockets, each as a function of bytes: no bytes may crash it or make it grow."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest

from stratagem.group.authentication.connections import (
    decode,
    encode,
    frame,
    read_answer,
    read_message,
)
from stratagem.group.authentication.secret import PLAIN, Credentials, admit, prove
from stratagem.group.hub import Hub
from stratagem.group.transport.endpoints import ClusterKeys
from stratagem.group.transport.listener import ClientMemories, Request
from stratagem.group.transport.shared_memory import ClientMemory, is_placed
from stratagem.group.transport.wire import Message, is_message, pack, unpack
from stratagem.group.verdict import GroupLimits
from stratagem.input.batch_messages import is_available, pack_batch, unpack_batch
from stratagem.launch.remote.job import FrameReader
from stratagem.parameter_server.server.server import ParameterServer

__all__ = ["PARSERS"]

_KEY = bytes(range(32))
_FRAME_END = b"\xff\xfeFRAME"
_LIMITS = GroupLimits(join_s=20, peer_s=20, stuck_s=600, barrier_s=20)
_ARRAYS = [np.arange(5, dtype=np.int16), np.ones((2, 3), np.float32), np.zeros(9000, np.int8)]


class _Sent:
    """A connection whose other side has sent all that it ever sends."""

    def __init__(self, data: bytes) -> None:
        self.data, self.num_answered = data, 0

    async def sock_recv(self, connection: object, size: int) -> bytes:
        part, self.data = self.data[:size], self.data[size:]
        return part

    async def sock_sendall(self, connection: object, data: bytes) -> None:
        self.num_answered += len(data)

    def getpeername(self) -> tuple[str, int]:
        return "127.0.0.1", 1


class _Writer:
    """Writes to nobody."""

    def write(self, data: bytes) -> None:
        assert data

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        pass


def _at_once(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Returns the result of a coroutine that has all that it could wait for."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("it waits, although nothing more comes")


_LOOP = asyncio.new_event_loop()


def _reader(data: bytes) -> asyncio.StreamReader:
    reader = asyncio.StreamReader(loop=_LOOP)
    reader.feed_data(data)
    reader.feed_eof()
    return reader


def _frame(text: bytes) -> bytes:
    return len(text).to_bytes(4, "big") + text


def parse_admission(data: bytes) -> None:
    """Greets as a stranger: no bytes are admitted, and at most 400 are read."""
    sent = _Sent(data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio, "get_running_loop", lambda: sent)
        with contextlib.suppress(ConnectionError, ValueError):
            assert _at_once(admit(sent, _KEY, PLAIN)) is None
    assert len(data) - len(sent.data) <= 400


def parse_proof(data: bytes) -> None:
    """Answers as a stranger in the place of a server."""
    sent = _Sent(data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio, "get_running_loop", lambda: sent)
        with contextlib.suppress(ConnectionError, ValueError):
            _at_once(prove(sent, _KEY, PLAIN, "member 1", server="worker 0"))
            raise AssertionError("bytes without the key are taken for a server")


def parse_group_message(data: bytes) -> None:
    """Reads a frame as process 0 does."""
    for framed in (data, _frame(data)):
        with contextlib.suppress(ConnectionError):
            assert isinstance(_at_once(read_message(_reader(framed))), dict)


def parse_group_answer(data: bytes) -> None:
    """Reads a frame as the others do."""
    for framed in (data, _frame(data)):
        with contextlib.suppress(ConnectionError):
            assert isinstance(_at_once(read_answer(_reader(framed), 2)), dict)


def parse_group_values(data: bytes) -> None:
    """Decodes a value of an exchange."""
    with contextlib.suppress(ValueError, RecursionError):
        decode(json.loads(data))


class _Hubs:
    """A hub with two members, renewed so that what members may tell it does not add up."""

    def __init__(self) -> None:
        self._hub: Any = None
        self._num_uses = 0

    def next(self) -> Any:
        if self._num_uses % 1000 == 0:
            self._hub = Hub(["a", "b"], _LIMITS, 0, Credentials(), 10)
            for member in self._hub._members:
                member.writer = _Writer()
        self._num_uses += 1
        return self._hub


_HUBS = _Hubs()


def parse_member(data: bytes) -> None:
    """Handles a message of a member in the hub."""
    hub = _HUBS.next()

    async def handle() -> None:
        with contextlib.suppress(ConnectionError):
            message = await read_message(_reader(_frame(data)))
            if message["kind"] == "hello":
                if hub._refusal(message) is None:
                    hub._compare(message)
            else:
                hub._handle(1, message)
            hub._judge()

    _LOOP.run_until_complete(handle())


def parse_job_log(data: bytes) -> None:
    """Reads the log of a remote job."""
    reader = FrameReader("n")
    text = data.decode(errors="replace")
    for found in reader.feed(f"\n\x1en{text}\n{text}\n"):
        assert list(map(type, (found.kind, found.task, found.text))) == [str] * 3
    assert len(reader.others) <= 100


def parse_server_frames(data: bytes) -> None:
    """Unpacks a message to a parameter server, and packs it again."""
    frames = data.split(_FRAME_END)
    if not is_message(frames):
        return
    try:
        message = unpack(frames)
    except ConnectionError:
        return
    assert unpack(pack(message)).kind == message.kind


class _Servers:
    """A server that is renewed, so that what clients may store in it does not add up."""

    def __init__(self) -> None:
        self._server: Any = None
        self._num_uses = 0

    def next(self) -> Any:
        if self._num_uses % 20_000 == 0:
            if self._server is not None:
                self._server.close()
            self._server = ParameterServer(ClusterKeys.make(), num_threads=1)
        self._num_uses += 1
        return self._server


_SERVERS = _Servers()


def parse_server_request(data: bytes) -> None:
    """Handles a request of a member in a server; each error is an answer."""
    frames = data.split(_FRAME_END)
    with contextlib.suppress(ConnectionError):
        message = unpack(frames)
        if message.kind != "rule":  # a member's optimizer is unpickled, which is trusted
            answers: list[Message] = []
            try:
                _SERVERS.next()._handle(Request(message, answers.append))
            except Exception as error:  # noqa: BLE001 - what the listener answers with
                Request(message, answers.append).fail(error)


_MEMORIES, _MEMORY = ClientMemories(), ClientMemory(2**16, 2**16)
_MEMORIES.share(b"c", _MEMORY.offer)


def parse_shared_memory(data: bytes) -> None:
    """Reads a message whose arrays are in shared memory."""
    frames = data.split(_FRAME_END)
    with contextlib.suppress(ConnectionError):
        for one in _MEMORIES.read(b"c", frames) if is_placed(frames) else ():
            bytes(one)


def parse_memory_offer(data: bytes) -> None:
    """Takes or declines the offer of a memory."""
    assert len(_MEMORIES.share(b"other", data)) == 2
    _MEMORIES.forget(b"other")


def parse_batch(data: bytes) -> None:
    """Unpacks a batch of an input worker. No class but a named tuple's is called."""
    frames = data.split(_FRAME_END)
    with contextlib.suppress(ConnectionError):
        unpack_batch(unpack(frames))


def _json(*values: object) -> list[bytes]:
    return [json.dumps(value).encode() for value in values]


_GROUP = (
    {"kind": "beat", "position": "python", "name": "", "step": 1, "moves": 1, "calls": 1},
    {"kind": "assigned", "calls": 1, "digest": 5, "notes": [[1, "rate", 5, "a.py:1"]]},
    {"kind": "exchange", "stream": "main", "number": 0, "name": "p", "value": 1, "limit_s": 20.0,
     "setting": "S"},
    {"kind": "announce", "topic": "leaving", "numbers": [1, 20, 0]},
    {"kind": "leave", "stream": "main"},
    {"kind": "hello", "process_id": 1, "num_processes": 2, "restart": 0,
     "facts": {"host": "h", "pid": 1, "address": "a", "same": {}}},
    {"kind": "error", "text": "x"},
    {"kind": "gone"},
)  # fmt: skip
_ANSWERS = (
    {"kind": "welcome", "address": "a"},
    {"kind": "progress", "num_missing": 1, "missing": "a"},
    {"kind": "exchanged", "stream": "main", "number": 0, "runs": [[1, 1], [2, 1]]},
    {"kind": "abandoned", "stream": "main", "number": 0, "by": ["a"]},
    {"kind": "announced", "announcements": [["leaving", 1, [1]]]},
    {"kind": "gone"},
    {"kind": "verdict", "error": "e", "message": "m", "lost": None, "silent_s": 1.0},
)
_FIELDS = {
    "client": "c", "number": 1, "names": ["v"], "sign": 1, "whole": ["v"], "rows": [],
    "version": 0, "pull": ["v"], "mode": {"num_needed": 0}, "optimizer": "",
    "specs": [{"name": "v", "shape": [5], "dtype": "int16", "first_row": 0, "has_rows": True}],
    "is_pickled": False, "num_needed": 1, "name": "count",
}  # fmt: skip
_KINDS = ("create", "assign", "scatter", "push", "pull", "pull_rows", "scalars", "describe",
          "drop_rule", "set_scalar", "expect", "flush")  # fmt: skip
_REQUESTS = [
    _FRAME_END.join(map(bytes, pack(Message(kind, {**_FIELDS, "number": number}, _ARRAYS[:1]))))
    for number, kind in enumerate(_KINDS, 1)
]
_LARGE = _FRAME_END.join(map(bytes, pack(Message("push", _FIELDS, _ARRAYS))))
_BATCH = {
    "x": np.arange(3000), "text": np.array(["a", b"b", None], object), "pair": (1, [2.5, None]),
    "date": np.array(["2026-01-01"], "M8[D]"), "bytes": b"x", "rows": np.float16(2),
}  # fmt: skip
_BATCHES = [
    _FRAME_END.join(map(bytes, pack(pack_batch(_BATCH, is_compressed=one, split=0))))
    for one in (False, *([True] if is_available() else []))
]
_VALUES = [1, "a", [1.5, None], {"a": (1, b"x")}, np.arange(3)]

PARSERS: dict[str, tuple[Callable[[bytes], None], list[bytes]]] = {
    "admission": (parse_admission, [PLAIN + bytes(32) + b"\x08member 1\r\n\r\n" + bytes(36)]),
    "proof": (parse_proof, [PLAIN + bytes(64), b"HTTP/1.1 400 Bad\r\n\r\n"]),
    "group_message": (parse_group_message, [*_json(*_GROUP), *map(frame, _GROUP)]),
    "group_answer": (parse_group_answer, [*_json(*_ANSWERS), *map(frame, _ANSWERS)]),
    "group_values": (parse_group_values, _json(*map(encode, _VALUES))),
    "member": (parse_member, _json(*_GROUP)),
    "job_log": (parse_job_log, _json([1, "out", "worker 0", "text"], [2, "answer", "", "x"])),
    "server_frames": (parse_server_frames, [*_REQUESTS, _LARGE]),
    "server_request": (parse_server_request, _REQUESTS),
    "batch": (parse_batch, _BATCHES),
    "shared_memory": (
        parse_shared_memory,
        [_FRAME_END.join(bytes(one) for one in _MEMORY.placed([b"{}", bytes(70_000)]))],
    ),
    "memory_offer": (parse_memory_offer, [_MEMORY.offer]),
}
"""By name: the parser, and valid inputs of it that the fuzzer begins with."""
