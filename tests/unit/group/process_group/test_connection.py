"""Port of a group: strangers, other programs on it, and members without the secret."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import gc
import http.server
import json
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratagem.group.authentication.connections import (
    decode,
    encode,
    frame,
    open_coordination_port,
    read_frame,
)
from stratagem.group.authentication.secret import Credentials
from stratagem.group.hub import Hub
from stratagem.group.member import Group
from stratagem.group.verdict import GroupLimits
from tests.fuzzing import JSON, fuzz
from tests.unit.group.authentication import peers
from tests.unit.group.authentication.certificates import make_certificates
from tests.unit.group.process_group.members import (
    as_bytes,
    connected,
    end_joining,
    free_port,
    hello,
    identity,
    running,
    together,
)
from tests.unit.launch.waiting import until

# So long that a test which waited for it would be noticed.
_LIMITS = GroupLimits(join_s=600, peer_s=600, stuck_s=600, barrier_s=600)


@pytest.fixture
def two(monkeypatch) -> Iterator[list[Group]]:
    """A group whose port gives a new connection half a second to say hello."""
    monkeypatch.setenv("STRATAGEM_HANDSHAKE_TIMEOUT_S", "600")
    with running(2, _LIMITS) as groups:
        groups[0]._connection._hub._hello_s = 0.5
        yield groups


def continues(groups: list[Group]) -> bool:
    return together(2, lambda i: groups[i].exchange("position", i)) == [[0, 1]] * 2


def rest_of(connection: socket.socket) -> bytes:
    """Returns what still comes before the other side closes."""
    connection.settimeout(120)
    with contextlib.suppress(ConnectionError):
        return peers.received(connection, 2**20)
    return b""


@pytest.mark.parametrize("message", [hello(1, 2), {"kind": "tunnel"}])
def test_stranger_is_no_member_and_reaches_no_service(message) -> None:
    port = free_port()
    with socket.create_server(("127.0.0.1", 0)) as service, contextlib.ExitStack() as stack:
        first = threading.Thread(
            target=lambda: stack.callback(Group(identity(0, 2, port), _LIMITS).abandon)
        )
        first.start()
        with peers.dialed(port) as stranger:
            stranger.sendall(as_bytes(message))
            assert rest_of(stranger) == b""
            second = Group(identity(1, 2, port), _LIMITS)
            first.join()
            stack.callback(second.abandon)
            assert second.identity.process_id == 1
        service.settimeout(0)
        with pytest.raises(BlockingIOError):
            service.accept()


def _leads_to(one: object, ends: set[Any]) -> bool:
    """True for an open socket whose other side is one of these."""
    with contextlib.suppress(OSError):
        return isinstance(one, socket.socket) and one.fileno() != -1 and one.getpeername() in ends
    return False


def test_idle_connections_are_closed_and_free_their_descriptors(two) -> None:
    gate = two[0]._connection._gate
    gate._limits = dataclasses.replace(gate._limits, timeout_s=0.5)
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(peers.dialed(two[0].identity.port)) for _ in range(100)]
        assert continues(two)
        for connection in idle:
            assert rest_of(connection) == b""
        until(lambda: len(gate._handshakes) == 0)
        ends = {connection.getsockname() for connection in idle}
        gc.collect()
        assert not [one for one in gc.get_objects() if _leads_to(one, ends)]
    assert continues(two)


@pytest.mark.parametrize("role", ["member 1", "other 1", ""])
def test_connection_that_says_nothing_is_closed(two, role) -> None:
    with connected(two[0].identity.port, claim=role) as connection:
        assert rest_of(connection) == b""
    assert continues(two)


def test_number_of_admitted_connections_is_limited(two) -> None:
    port = two[0].identity.port
    with contextlib.ExitStack() as stack:
        two[0]._connection._hub._hello_s = 600
        opened = [stack.enter_context(connected(port, claim="tunnel 1")) for _ in range(30)]
        # 16 for two members, two of which they have
        until(lambda: sum(map(peers.is_closed, opened)) >= 14)
        assert continues(two)


def test_members_with_the_secret_and_certificates_train(monkeypatch, tmp_path) -> None:
    for name, text in make_certificates(tmp_path).items():
        monkeypatch.setenv(name, text)
    monkeypatch.setenv("STRATAGEM_SECRET", "s" * 32)
    credentials = Credentials.find("worker 0", ["127.0.0.1"])
    port = free_port()
    groups = together(2, lambda i: Group(identity(i, 2, port), _LIMITS, credentials))
    try:
        assert continues(groups)
    finally:
        for group in groups:
            group.abandon()


@pytest.mark.slow
def test_certificate_that_process_0_does_not_accept_is_named(monkeypatch, tmp_path) -> None:
    """TLS 1.3 refuses it after the client has ended its part."""
    monkeypatch.setenv("STRATAGEM_SECRET", "s" * 32)
    found: list[Credentials] = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        for name, text in make_certificates(folder).items():
            monkeypatch.setenv(name, text)
        (folder / "ca.crt").write_bytes((tmp_path / "a" / "ca.crt").read_bytes())
        found.append(Credentials.find("worker", ["127.0.0.1"]))
    port, limits = free_port(), dataclasses.replace(_LIMITS)

    def join(index: int) -> Group:
        try:
            return Group(identity(index, 2, port), limits if index == 0 else _LIMITS, found[index])
        finally:
            if index:
                end_joining(limits)

    _, error = together(2, join)
    assert isinstance(error, ValueError)
    assert "TLS with worker 0 (host0:1) failed" in str(error)


class _Page(http.server.BaseHTTPRequestHandler):
    def log_message(self, *words: Any) -> None:
        pass


def test_port_that_a_web_server_has_taken_ends_all_workers_at_once() -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), _Page) as taken:
        serving = threading.Thread(target=taken.serve_forever, args=(0.05,))
        serving.start()
        port = taken.server_port
        errors = together(3, lambda i: Group(identity(i, 3, port), _LIMITS))
        taken.shutdown()
        serving.join()
    assert [type(error) for error in errors] == [ValueError] * 3
    assert f"worker 0 (host0:1) cannot listen on port {port}" in str(errors[0])
    for error in errors[1:]:
        assert f"Another program has taken port {port} of worker 0 (host0:1)" in str(error)


def test_port_that_a_silent_program_has_taken_is_named_after_the_limit(monkeypatch) -> None:
    monkeypatch.setenv("STRATAGEM_HANDSHAKE_TIMEOUT_S", "0.1")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        limits = GroupLimits(join_s=600, peer_s=0.5)
        with pytest.raises(
            ValueError,
            match=rf"Port {port} of worker 0 \(host0:1\) accepts connections, but does not answer "
            r"worker 1 \(host1:1\)(?s:.)*STRATAGEM_PEER_TIMEOUT_S",
        ):
            Group(identity(1, 2, port), limits)


def test_coordination_port_leads_through_the_tunnel(two) -> None:
    service_port = two[0].open_coordination_port()
    door = two[1].open_coordination_port()
    assert door not in (service_port, two[0].identity.port)
    with (
        socket.create_server(("127.0.0.1", service_port)) as service,
        socket.create_connection(("127.0.0.1", door), 120) as client,
    ):
        client.sendall(b"ping")
        inner, _ = service.accept()
        with inner:
            assert peers.received(inner, 4) == b"ping"
            inner.sendall(b"pong")
            assert peers.received(client, 4) == b"pong"


def test_door_closes_a_connection_that_leads_nowhere(two) -> None:
    door = two[1].open_coordination_port()
    two[0].abandon()
    with socket.create_connection(("127.0.0.1", door), 120) as client:
        assert rest_of(client) == b""


class _SlowToEnd:
    """The answers of process 0, whose reader ends a while after it is told to."""

    def __init__(self) -> None:
        self.is_told = asyncio.Event()

    async def read(self, _: int) -> bytes:
        try:
            await asyncio.Event().wait()
        finally:
            self.is_told.set()
            await asyncio.Event().wait()
        return b""


def test_tunnel_that_is_cancelled_while_it_ends_is_closed() -> None:
    async def ended() -> bool:
        slow = _SlowToEnd()
        far = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
        _, outer = await asyncio.open_connection(*far.sockets[0].getsockname())

        async def connect() -> Any:
            return slow, outer

        before = asyncio.all_tasks()
        door = await open_coordination_port(connect)
        _, client = await asyncio.open_connection(*door.sockets[0].getsockname())
        client.close()
        await asyncio.wait_for(slow.is_told.wait(), 120)
        for _ in range(2):  # as a group that ends does, until no task is left
            for task in asyncio.all_tasks() - before:
                task.cancel()
            await asyncio.sleep(0.05)
        door.close()
        far.close()
        return outer.is_closing()

    assert asyncio.run(ended())


# Control messages of process 0: their bytes grow as the number of processes does.

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


async def _barrier_and_end(wires: list[_Wire]) -> None:
    for wire in wires:
        wire.reader.feed_data(frame(_BARRIER))
    for wire in wires:
        assert (await _next(wire, "exchanged"))["runs"] == [[None, len(wires)]]
        wire.reader.feed_data(frame({"kind": "gone"}))
    for wire in wires:
        await _next(wire, "gone")
        wire.reader.feed_eof()


async def _lose_one(wires: list[_Wire]) -> None:
    wires[-1].reader.feed_eof()
    for wire in wires[:-1]:
        assert "died" in (await _next(wire, "verdict"))["message"]
        wire.reader.feed_eof()


@pytest.mark.parametrize("act", [_barrier_and_end, _lose_one])
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


# Encoding of values between processes.


_PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
_VALUES = st.recursive(
    _PLAIN | st.binary(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.sampled_from(["a", "tuple", "bytes", "array", "dict"]), inner)
    ),
)


@given(_VALUES)
def test_values_come_back_as_they_were(value) -> None:
    back = decode(json.loads(json.dumps(encode(value))))
    assert repr(back) == repr(value)  # of the same types, too


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype="int32").reshape(2, 3),
        np.zeros((0, 4), "float16"),
        np.array(2.5),
        np.array([True, False]),
        np.array([1.5, -2.0], ml_dtypes.bfloat16),
        np.arange(6.0).reshape(2, 3).T,
        np.array([["a", "b\0c"], ["", "é"]]),
        np.array([b"\x00\xff", b"x"]),
        np.zeros((0, 2), "U3"),
    ],
    ids=lambda array: f"{array.dtype}{array.shape}",
)
def test_arrays_come_back_with_their_shape_and_dtype(array) -> None:
    back = decode(json.loads(json.dumps(encode({"a": array}))))["a"]
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    np.testing.assert_array_equal(back, array)
    back[...] = 1  # it is a copy of one's own


@pytest.mark.parametrize("value", [object(), {1: 2}, {"a": {3}}, np.array(["a"], object), len])
def test_values_that_need_pickling_are_rejected(value) -> None:
    with pytest.raises(TypeError, match=r"cannot be sent to other processes(?s:.)*pickled"):
        encode(value)


_NESTED: list[object] = functools.reduce(lambda inner, _: [inner], range(10_000), [])


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"tuple": 3},
        {"bytes": "a"},
        {"array": ["object", [1], "AAAAAAAAAAA="]},
        {"array": ["V8", [1], "AAAAAAAAAAA="]},
        {"array": ["int32", [2**70], ""]},
        {"array": ["int32", [3], "AAAA"]},
        *(
            {"array": [dtype, [0], ""]}
            for dtype in (",bstey ", "i4,(", "i4,i4", "O", "U4", "", "int32\n", 3)
        ),
        {"strings": ["int32", [1], ["1"]]},
        {"strings": ["<U1", [2], ["a"]]},
        {"strings": ["<U99999999", [1], ["a"]]},
        {"strings": ["<U1,int32", [1], ["a"]]},
        {"dict": []},
        {"a": 1, "b": 2},
        _NESTED,
    ],
    ids=lambda value: str(value) if value is not _NESTED else "nested",
)
def test_what_no_process_encodes_is_a_value_error(value) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - from several libraries
        decode(value)


_ENCODED = st.builds(
    lambda kind, content: {kind: content},
    st.sampled_from(["tuple", "bytes", "array", "dict"]),
    JSON | st.tuples(st.sampled_from(["int8", "float64", "O", "U3"]), JSON, st.just("AAAA")),
)


@fuzz
@given(st.lists(st.one_of(JSON, _ENCODED, st.lists(_ENCODED, max_size=3)), max_size=20))
def test_any_json_is_a_value_or_a_value_error(values) -> None:
    for value in values:
        with contextlib.suppress(ValueError):
            decode(value)
