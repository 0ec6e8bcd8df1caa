"""Handshake: proofs on both sides, and what strangers can and cannot do."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratagem.group.authentication.secret import PLAIN, TLS, admit, prove
from tests.fuzzing import fuzz
from tests.unit.group.authentication import peers

_KEY, _OTHER = bytes(range(32)), bytes(32)
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


def test_client_with_another_key_is_refused_and_learns_no_proof() -> None:
    assert with_server(lambda one: peers.prove(one, _OTHER, _CLAIM)) == (None, b"\0")


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


@pytest.mark.parametrize("claim", ["member 0", "member 10", "tunnel 1", ""])
def test_proof_is_bound_to_the_claim(claim) -> None:
    """A man in the middle cannot change the rank of a worker."""
    nonce = os.urandom(32)

    def change(connection: socket.socket) -> bytes:
        connection.sendall(peers.opening(claim, nonce))
        nonces = nonce + peers.received(connection, 40)[8:]
        connection.sendall(peers.proof("client", _KEY, nonces, _CLAIM))
        return peers.received(connection, 33)

    assert with_server(change) == (None, b"\0")


@pytest.mark.parametrize("side", ["server", ""])
def test_proof_of_the_other_side_is_refused(side) -> None:
    nonce = os.urandom(32)

    def act(connection: socket.socket) -> bytes:
        connection.sendall(peers.opening(_CLAIM, nonce))
        nonces = nonce + peers.received(connection, 40)[8:]
        connection.sendall(peers.proof(side, _KEY, nonces, _CLAIM))
        return peers.received(connection, 33)

    assert with_server(act) == (None, b"\0")


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


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n", b"SSH-2", b"\0"])
def test_another_program_on_the_port_is_named_with_the_port(answer) -> None:
    error = with_client(lambda one: one.sendall(answer))
    assert isinstance(error, ValueError)
    assert "Another program has taken port" in str(error)
    assert "of worker 0 (a:1): it answers at 127.0.0.1:" in str(error)


def test_web_server_answers_at_once() -> None:
    """Without the end of a line, it would wait for more."""

    def serve(connection: socket.socket) -> None:
        with connection.makefile("rb") as lines:
            lines.readline()
            lines.readline()
        connection.sendall(b"HTTP/1.1 400 Bad request\r\n\r\n")

    assert "Another program has taken port" in str(with_client(serve))


def test_server_that_closes_is_no_other_program() -> None:
    error = with_client(lambda one: peers.received(one, 8))
    assert isinstance(error, ConnectionError)
    assert "the connection closed during the handshake" in str(error)


@pytest.mark.parametrize(("mode", "other"), [(PLAIN, TLS), (TLS, PLAIN)])
def test_two_modes_do_not_meet(mode, other) -> None:
    claim, answer = with_server(
        lambda one: [
            one.sendall(peers.opening(_CLAIM, bytes(32), other)),
            peers.received(one, 200),
        ],
        mode=mode,
    )
    assert (claim, answer[1][:8], len(answer[1])) == (None, mode, 40)
    error = with_client(lambda one: one.sendall(other + bytes(32)), mode=mode)
    encrypted = "this process" if mode == TLS else "worker 0 (a:1)"
    assert f"Only {encrypted} uses TLS" in str(error)


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
