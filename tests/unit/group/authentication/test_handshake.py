"""Handshake: proofs on both sides, and what strangers can and cannot do."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratagem.group.authentication.secret import (
    PLAIN,
    TLS,
    Credentials,
    Gate,
    HandshakeLimits,
    Secret,
    admit,
    prove,
)
from tests.fuzzing import fuzz
from tests.unit.group.authentication import peers
from tests.unit.launch.waiting import until

_KEY = bytes(range(32))
_CLAIM = "member 1"


def with_server(act: Callable[[socket.socket], Any], key: bytes = _KEY, mode: bytes = PLAIN) -> Any:
    """Runs a server of one connection beside `act`; returns its claim and the result."""
    theirs, ours = socket.socketpair()
    results: list[Any] = []

    async def serve() -> str | None:
        async with asyncio.timeout(20):
            return await admit(theirs, key, mode)

    def run() -> None:
        theirs.setblocking(False)
        try:
            results.append(asyncio.run(serve()))
        except OSError as error:
            results.append(type(error))
        theirs.close()

    with ours:
        server = threading.Thread(target=run)
        server.start()
        ours.settimeout(120)
        result = act(ours)
    server.join()
    return results[0], result


def with_client(act: Callable[[socket.socket], Any], key: bytes = _KEY, mode: bytes = PLAIN) -> Any:
    """Runs a client beside `act`, which is the server; returns the client's error or None."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        async def run() -> None:
            connection = socket.socket()
            connection.setblocking(False)
            with connection:
                await asyncio.get_running_loop().sock_connect(connection, listener.getsockname())
                async with asyncio.timeout(20):
                    await prove(connection, key, mode, _CLAIM, server="worker 0 (a:1)")

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(120)
                act(connection)

        server = threading.Thread(target=serve)
        server.start()
        try:
            return asyncio.run(run())
        except (OSError, ValueError) as error:
            return error
        finally:
            server.join()


def test_client_with_the_key_is_admitted_with_its_claim() -> None:
    claim, accepted = with_server(lambda one: peers.prove(one, _KEY, _CLAIM))
    assert (claim, accepted[:1], len(accepted)) == (_CLAIM, b"\1", 33)


def test_replayed_proof_is_refused() -> None:
    nonce, spoken = os.urandom(32), []

    def listen_in(connection: socket.socket) -> None:
        connection.sendall(peers.opening(_CLAIM, nonce))
        nonces = nonce + peers.received(connection, 40)[8:]
        spoken.append(peers.proof("client", _KEY, nonces, _CLAIM))
        connection.sendall(spoken[0])
        assert len(peers.received(connection, 33)) == 33

    def replay(connection: socket.socket) -> bytes:
        connection.sendall(peers.opening(_CLAIM, nonce))
        peers.received(connection, 40)
        connection.sendall(spoken[0])
        return peers.received(connection, 33)

    assert with_server(listen_in)[0] == _CLAIM
    assert with_server(replay) == (None, b"\0")


@pytest.mark.parametrize(
    ("claim", "side"),
    [
        *((one, "client") for one in ("member 0", "member 10", "tunnel 1", "")),
        (_CLAIM, "server"),
        (_CLAIM, ""),
    ],
)
def test_proof_is_bound_to_the_claim_and_the_side(claim, side) -> None:
    """A man in the middle cannot change the rank of a worker."""
    nonce = os.urandom(32)

    def change(connection: socket.socket) -> bytes:
        connection.sendall(peers.opening(claim, nonce))
        nonces = nonce + peers.received(connection, 40)[8:]
        connection.sendall(peers.proof(side, _KEY, nonces, _CLAIM))
        return peers.received(connection, 33)

    assert with_server(change) == (None, b"\0")


def _reflect(connection: socket.socket) -> None:
    """Sends back what a client sends, as if it were a server."""
    opened = peers.received(connection, 8 + 32 + 1 + len(_CLAIM) + 4)
    connection.sendall(opened[:40])
    connection.sendall(b"\1" + peers.received(connection, 32))


def _accept_anything(connection: socket.socket) -> None:
    peers.received(connection, 8 + 32 + 1 + len(_CLAIM) + 4)
    connection.sendall(peers.MODE + os.urandom(32))
    peers.received(connection, 32)
    connection.sendall(b"\1" + os.urandom(32))


@pytest.mark.parametrize("server", [_reflect, _accept_anything])
def test_server_without_the_key_is_not_believed(server) -> None:
    error = with_client(server)
    assert isinstance(error, ValueError)
    assert "worker 0 (a:1) and this process do not have the same secret" in str(error)


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        *(
            (answer, ValueError, "Another program has taken port .* of worker 0 .*: it answers at")
            for answer in (b"HTTP/1.1 400 Bad Request\r\n", b"SSH-2", b"\0")
        ),
        (TLS + bytes(32), ValueError, r"Only worker 0 \(a:1\) uses TLS"),
        (b"", ConnectionError, "the connection closed during the handshake"),
    ],
)
def test_another_answer_is_named(answer, error, words) -> None:
    def serve(connection: socket.socket) -> None:
        peers.received(connection, 8 + 32 + 1 + len(_CLAIM) + 4)
        connection.sendall(answer)

    found = with_client(serve)
    assert isinstance(found, error)
    assert re.search(words, str(found))


def test_client_of_another_mode_learns_the_mode() -> None:
    claim, answer = with_server(
        lambda one: [one.sendall(peers.opening(_CLAIM, bytes(32), TLS)), peers.received(one, 200)]
    )
    assert (claim, answer[1][:8], len(answer[1])) == (None, PLAIN, 40)


def test_web_server_answers_at_once() -> None:
    """Without the end of a line, it would wait for more."""

    def serve(connection: socket.socket) -> None:
        with connection.makefile("rb") as lines:
            lines.readline()
            lines.readline()
        connection.sendall(b"HTTP/1.1 400 Bad request\r\n\r\n")

    assert "Another program has taken port" in str(with_client(serve))


def test_claim_that_is_no_text_is_refused() -> None:
    nonce, claim = os.urandom(32), b"\xff"

    def act(connection: socket.socket) -> None:
        connection.sendall(peers.MODE + nonce + b"\1" + claim + b"\r\n\r\n")
        nonces = nonce + peers.received(connection, 40)[8:]
        proof = peers.hmac.new(_KEY, b"client" + peers.MODE + nonces + claim, "sha256")
        connection.sendall(proof.digest())
        peers.received(connection, 33)

    assert with_server(act)[0] is None


class _Sent:
    """A connection whose other side has sent all that it ever sends."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.answers = b""

    async def sock_recv(self, connection: object, size: int) -> bytes:
        part, self.data = self.data[:size], self.data[size:]
        return part

    async def sock_sendall(self, connection: object, data: bytes) -> None:
        self.answers += data


def _result_of(coroutine) -> Any:
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    except (OSError, ValueError) as error:
        return error
    raise AssertionError("it waits, although nothing more comes")


_FRAMES = st.one_of(
    st.binary(max_size=400),
    st.builds(lambda rest: PLAIN + rest, st.binary(max_size=400)),
    st.builds(
        lambda nonce, claim, rest: peers.MODE + nonce + bytes([len(claim)]) + claim + rest,
        st.binary(min_size=32, max_size=32),
        st.binary(max_size=255),
        st.builds(lambda rest: b"\r\n\r\n" + rest, st.binary(max_size=80)),
    ),
)


@fuzz
@given(st.lists(_FRAMES, min_size=1, max_size=20))
def test_no_bytes_are_admitted_and_little_is_read(monkeypatched_loop, frames) -> None:
    for data in frames:
        sent = monkeypatched_loop(data)
        assert isinstance(_result_of(admit(None, _KEY, PLAIN)), ConnectionError | None)
        assert len(data) - len(sent.data) <= 8 + 32 + 1 + 255 + 4 + 32
        assert len(sent.answers) <= 41


@fuzz
@given(st.lists(_FRAMES, min_size=1, max_size=20))
def test_no_bytes_are_taken_for_a_server(monkeypatched_loop, frames) -> None:
    class Peer:
        def getpeername(self) -> tuple[str, int]:
            return "127.0.0.1", 1

    for data in frames:
        sent = monkeypatched_loop(data)
        error = _result_of(prove(Peer(), _KEY, PLAIN, _CLAIM, server="worker 0"))
        assert isinstance(error, ConnectionError | ValueError)
        assert len(data) - len(sent.data) <= 8 + 32 + 1 + 32


@pytest.fixture
def monkeypatched_loop(monkeypatch) -> Callable[[bytes], _Sent]:
    """Puts bytes in the place of the event loop's sockets."""

    def put(data: bytes) -> _Sent:
        sent = _Sent(data)
        monkeypatch.setattr(asyncio, "get_running_loop", lambda: sent)
        return sent

    return put


# Gate: strangers are held off within its limits, in a thread of its own.

_SECRET = "s" * 32
_KEY_OF_GATE = peers.key("test", _SECRET)
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


@pytest.mark.parametrize(
    ("key", "claims"),
    [(_KEY_OF_GATE, ["member 3"]), (peers.key("test"), []), (peers.key("group", _SECRET), [])],
    ids=["holder", "no secret", "another purpose"],
)
def test_holder_of_the_secret_is_handed_over_by_a_thread_of_its_own(admitted, key, claims) -> None:
    with gate(admitted) as (made, port), peers.dialed(port) as connection:
        assert peers.prove(connection, key, "member 3")[:1] == (b"\1" if claims else b"\0")
        until(lambda: not len(made._handshakes))
    assert admitted.claims == claims
    assert admitted.threads == ({"stratagem-gate"} if claims else set())


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


def test_idle_connections_do_not_keep_members_out(admitted) -> None:
    limits = HandshakeLimits(timeout_s=600, total=8, per_address=600)
    with gate(admitted, limits) as (made, port), contextlib.ExitStack() as stack:
        idle = [stack.enter_context(peers.dialed(port)) for _ in range(20)]
        peers.prove(stack.enter_context(peers.dialed(port)), _KEY_OF_GATE, "member 1")
        until(lambda: admitted.claims)
        assert len(made._handshakes) <= 8
        assert all(map(is_closed, idle[:12]))


def test_one_address_cannot_use_up_the_limit(admitted) -> None:
    limits = HandshakeLimits(timeout_s=600, total=8, per_address=3)
    with gate(admitted, limits) as (made, port), contextlib.ExitStack() as stack:
        other = socket.create_connection(("127.0.0.1", port), source_address=("127.0.0.2", 0))
        stack.enter_context(other)
        idle = [stack.enter_context(peers.dialed(port)) for _ in range(20)]
        assert all(map(is_closed, idle[:17]))
        until(lambda: len(made._handshakes) <= 4)
        assert peers.prove(other, _KEY_OF_GATE, "member 1")[:1] == b"\1"


def test_limits_are_those_of_the_settings(monkeypatch) -> None:
    assert HandshakeLimits.find() == HandshakeLimits()
    for name, text in (("TIMEOUT_S", "2"), ("", "9"), ("_PER_ADDRESS", "5")):
        prefix = "STRATAGEM_HANDSHAKE_" if "TIME" in name else "STRATAGEM_MAX_HANDSHAKES"
        monkeypatch.setenv(prefix + name, text)
    assert HandshakeLimits.find() == HandshakeLimits(timeout_s=2.0, total=9, per_address=5)


def test_nothing_is_left_after_the_end(admitted) -> None:
    with gate(admitted) as (made, port):
        idle = peers.dialed(port)
        until(lambda: len(made._handshakes))
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
