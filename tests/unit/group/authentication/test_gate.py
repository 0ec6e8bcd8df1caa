"""Gate: strangers are held off within its limits, in a thread of its own."""

from __future__ import annotations

import contextlib
import gc
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from stratagem.group.authentication.secret import Credentials, Gate, HandshakeLimits, Secret
from tests.unit.group.authentication import peers
from tests.unit.launch.waiting import until

_SECRET = "s" * 32
_KEY = peers.key("test", _SECRET)
_PATIENT = HandshakeLimits(timeout_s=600, total=1000, per_address=1000)


class Admitted:
    """Connections that a gate has handed over."""

    def __init__(self) -> None:
        self.claims: list[str] = []
        self.threads: set[str] = set()
        self.sockets = contextlib.ExitStack()

    def add(self, connection: socket.socket, claim: str) -> None:
        self.sockets.enter_context(connection)
        self.threads.add(threading.current_thread().name)
        self.claims.append(claim)


@pytest.fixture
def admitted() -> Iterator[Admitted]:
    made = Admitted()
    with made.sockets:
        yield made


@contextlib.contextmanager
def gate(admitted: Admitted, limits: HandshakeLimits = _PATIENT) -> Iterator[tuple[Gate, int]]:
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    credentials = Credentials(Secret(_SECRET))
    with Gate([listener], credentials, admitted.add, purpose="test", limits=limits) as made:
        yield made, listener.getsockname()[1]


def is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


def test_holder_of_the_secret_is_handed_over_by_a_thread_of_its_own(admitted) -> None:
    with gate(admitted) as (_, port), peers.dialed(port) as connection:
        peers.prove(connection, _KEY, "member 3")
        until(lambda: admitted.claims)
    assert admitted.claims == ["member 3"]
    assert admitted.threads == {"stratagem-gate"}


@pytest.mark.parametrize("key", [peers.key("test"), peers.key("group", _SECRET)])
def test_key_without_the_secret_or_for_another_port_is_refused(admitted, key) -> None:
    with gate(admitted) as (made, port), peers.dialed(port) as connection:
        assert peers.prove(connection, key, "member 3") == b"\0"
        until(lambda: not made.num_handshakes)
    assert admitted.claims == []


@pytest.mark.parametrize("data", [b"", b"SGau", peers.opening("member 1", bytes(32))])
def test_connection_that_does_not_go_on_is_closed(admitted, data) -> None:
    limits = HandshakeLimits(timeout_s=0.2)
    with gate(admitted, limits) as (_, port), peers.dialed(port) as connection:
        connection.sendall(data)
        while not is_closed(connection):
            pass


def test_one_byte_at_a_time_does_not_extend_the_limit(admitted) -> None:
    with gate(admitted, HandshakeLimits(timeout_s=0.5)) as (_, port), peers.dialed(port) as slow:
        sent = 0
        with contextlib.suppress(ConnectionError):
            for byte in peers.MODE + b"a" * 1000:
                slow.sendall(bytes([byte]))
                sent += 1
                time.sleep(0.02)
    assert sent < 1000


def test_frame_of_a_stranger_is_not_read(admitted) -> None:
    """Of 64 MiB, only what fits into the buffers of the system leaves the sender."""
    data = memoryview(bytes(64 * 2**20))
    with (
        gate(admitted) as (_, port),
        peers.dialed(port) as connection,
        pytest.raises(ConnectionError),
    ):
        connection.sendall(data)
    assert admitted.claims == []


def test_idle_connections_do_not_keep_members_out(admitted) -> None:
    limits = HandshakeLimits(timeout_s=600, total=8, per_address=600)
    with gate(admitted, limits) as (made, port), contextlib.ExitStack() as stack:
        idle = [stack.enter_context(peers.dialed(port)) for _ in range(20)]
        peers.prove(stack.enter_context(peers.dialed(port)), _KEY, "member 1")
        until(lambda: admitted.claims)
        assert made.num_handshakes <= 8
        assert all(map(is_closed, idle[:12]))


def test_one_address_cannot_use_up_the_limit(admitted) -> None:
    limits = HandshakeLimits(timeout_s=600, total=8, per_address=3)
    with gate(admitted, limits) as (made, port), contextlib.ExitStack() as stack:
        other = socket.create_connection(("127.0.0.1", port), source_address=("127.0.0.2", 0))
        stack.enter_context(other)
        idle = [stack.enter_context(peers.dialed(port)) for _ in range(20)]
        assert all(map(is_closed, idle[:17]))
        until(lambda: made.num_handshakes <= 4)
        assert peers.prove(other, _KEY, "member 1")[:1] == b"\1"


def test_limits_are_those_of_the_settings(monkeypatch) -> None:
    assert HandshakeLimits.find() == HandshakeLimits()
    for name, text in (("TIMEOUT_S", "2"), ("", "9"), ("_PER_ADDRESS", "5")):
        prefix = "STRATAGEM_HANDSHAKE_" if "TIME" in name else "STRATAGEM_MAX_HANDSHAKES"
        monkeypatch.setenv(prefix + name, text)
    assert HandshakeLimits.find() == HandshakeLimits(timeout_s=2.0, total=9, per_address=5)


def test_nothing_is_left_after_the_end(admitted) -> None:
    with gate(admitted) as (made, port):
        idle = peers.dialed(port)
        until(lambda: made.num_handshakes)
    with idle:
        assert is_closed(idle)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    assert "stratagem-gate" not in [thread.name for thread in threading.enumerate()]


def test_a_connection_that_arrives_at_the_end_is_closed(admitted) -> None:
    """It is accepted in the same turn of the loop in which the loop stops."""
    held = threading.Event()
    with gate(admitted) as (made, port):
        made._loop.call_soon_threadsafe(held.wait, 120)
        late = socket.create_connection(("127.0.0.1", port), timeout=120)
        made._loop.call_soon_threadsafe(made._loop.stop)
        held.set()
    with late:
        assert is_closed(late)
    gc.collect()  # a socket that is lost unclosed is an error of this test
