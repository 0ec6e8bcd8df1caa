"""Peers without the keys of the cluster: they cost a server neither memory nor connections."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from stratagem.group.transport import listener as module
from stratagem.group.transport.connection import Connections
from stratagem.group.transport.keys import ClusterKeys
from stratagem.group.transport.listener import Listener, Request
from stratagem.group.transport.wire import Message
from tests.unit.group.transport.strangers import (
    connect,
    flood,
    greeting,
    is_closed,
    long_frame,
    resident_bytes,
)

_FLOOD_BYTES = 2**27
# Of one frame that may be announced, and of buffers of the socket and of ZeroMQ.
_MOST_GROWTH_BYTES = 2**23
_PROGRAM = """
import sys
from stratagem.parameter_server.server.server import ParameterServer
from stratagem.group.transport.keys import ClusterKeys
with ParameterServer(ClusterKeys.from_json(sys.stdin.readline())) as server:
    print(server.address, flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def keys() -> ClusterKeys:
    return ClusterKeys.make()


@pytest.fixture
def server(keys) -> Iterator[tuple[int, str]]:
    """Process id and address of a server in a process of its own."""
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{keys.as_json()}\n")
    process.stdin.flush()
    yield process.pid, process.stdout.readline().strip()
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write("\n")
    process.stdin.close()
    process.wait(60)
    process.stdout.close()


def serves(keys: ClusterKeys, address: str) -> bool:
    with Connections(keys, [address]) as connections:
        answer = connections.ask(0, Message("describe"), timeout_s=60.0)
    return answer.kind == "ok"


@pytest.mark.parametrize(
    "begin",
    [
        greeting(b"CURVE") + long_frame(2**40),
        greeting(b"CURVE") + long_frame(_FLOOD_BYTES),
        greeting(b"CURVE") + long_frame(_FLOOD_BYTES, is_command=False),
        greeting(b"PLAIN") + long_frame(_FLOOD_BYTES),
        greeting(b"NULL") + long_frame(_FLOOD_BYTES),
        b"\xff" + (2**40).to_bytes(8, "big"),
        b"\x01\x00" * 1000,
        b"GET / HTTP/1.1\r\n",
        b"\xff" * 64,
    ],
    ids=["1TiB", "CURVE", "message", "PLAIN", "NULL", "ZMTP1", "old", "HTTP", "ones"],
)
def test_frame_before_the_handshake_takes_no_memory(keys, server, begin) -> None:
    pid, address = server
    assert serves(keys, address)
    before_bytes = resident_bytes(pid)
    with contextlib.ExitStack() as stack:
        for _ in range(4):
            stranger = stack.enter_context(connect(address))
            stranger.settimeout(2.0)  # a stranger that the server stopped to read
            with contextlib.suppress(OSError):
                stranger.sendall(begin)
            flood(stranger, _FLOOD_BYTES // 4)
        assert resident_bytes(pid) - before_bytes < _MOST_GROWTH_BYTES
    assert serves(keys, address)


def test_handshake_that_does_not_end_is_closed_and_clients_are_served_meanwhile(
    keys, monkeypatch
) -> None:
    monkeypatch.setattr(module, "_HANDSHAKE_MS", 500)

    def handle(request: Request) -> None:
        request.answer(request.message)

    with (
        Listener(keys, handle) as listener,
        Connections(keys, [listener.address]) as connections,
        contextlib.ExitStack() as stack,
    ):
        strangers = [stack.enter_context(connect(listener.address)) for _ in range(50)]
        for place, stranger in enumerate(strangers):
            stranger.sendall(greeting(b"CURVE")[: place + 14])
        array = np.arange(2**20)  # in more than one frame
        answer = connections.ask(0, Message("x", {}, [array]), timeout_s=60.0)
        np.testing.assert_array_equal(answer.arrays[0], array)
        assert all(is_closed(stranger, 120.0) for stranger in strangers)
        assert connections.ask(0, Message("y"), timeout_s=60.0).kind == "y"


def test_no_handshake_may_take_longer_than_ten_seconds() -> None:
    assert module._HANDSHAKE_MS <= 10_000
