"""Authenticated connections: streams of both sides, plain and encrypted."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from stratagem.group.authentication.connections import UnansweredError, connect, open_streams
from stratagem.group.authentication.secret import Credentials, Gate, Secret
from tests.unit.group.authentication.certificates import make_certificates

_SECRET = Secret("s" * 32)


@contextlib.asynccontextmanager
async def echo(credentials: Credentials) -> AsyncIterator[int]:
    """A server that sends back what it gets; yields its port."""
    loop = asyncio.get_running_loop()
    tasks: list[asyncio.Task[None]] = []

    async def serve(connection: socket.socket) -> None:
        writer = None
        with contextlib.suppress(OSError):
            reader, writer = await open_streams(connection, credentials, is_server=True)
            while data := await reader.read(2**16):
                writer.write(data)
        (writer or connection).close()

    def start(connection: socket.socket) -> None:
        tasks.append(loop.create_task(serve(connection)))

    def admit(connection: socket.socket, claim: str) -> None:
        assert claim == "member 1"
        loop.call_soon_threadsafe(start, connection)

    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    with Gate([listener], credentials, admit, purpose="test"):
        yield port
    await asyncio.gather(*tasks)


async def reach(port: int, credentials: Credentials, limit_s: float = 20) -> Any:
    return await connect(
        "127.0.0.1",
        port,
        credentials,
        "member 1",
        purpose="test",
        server="worker 0 (a:1)",
        limit_s=limit_s,
    )


async def exchanged(server: Credentials, client: Credentials) -> bytes:
    async with echo(server) as port:
        reader, writer = await reach(port, client)
        try:
            writer.write(b"x" * 10**6)
            return await asyncio.wait_for(reader.readexactly(10**6), 120)
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


def credentials(monkeypatch, variables: dict[str, str]) -> Credentials:
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    monkeypatch.setenv("STRATAGEM_SECRET", "s" * 32)
    return Credentials.find("worker 0", ["127.0.0.1"])


def test_plain_connection_carries_data() -> None:
    one = Credentials(_SECRET)
    assert asyncio.run(exchanged(one, one)) == b"x" * 10**6


def test_encrypted_connection_carries_data(monkeypatch, tmp_path) -> None:
    one = credentials(monkeypatch, make_certificates(tmp_path))
    assert asyncio.run(exchanged(one, one)) == b"x" * 10**6


def test_certificate_of_another_authority_is_refused(monkeypatch, tmp_path) -> None:
    server = credentials(monkeypatch, make_certificates(tmp_path / "a"))
    client = credentials(monkeypatch, make_certificates(tmp_path / "b"))
    with pytest.raises(ValueError, match=r"TLS with worker 0 \(a:1\) failed(?s:.)*one authority"):
        asyncio.run(exchanged(server, client))


def test_one_side_without_tls_is_named(monkeypatch, tmp_path) -> None:
    encrypted = credentials(monkeypatch, make_certificates(tmp_path))
    with pytest.raises(ValueError, match=r"Only worker 0 \(a:1\) uses TLS"):
        asyncio.run(exchanged(encrypted, Credentials(_SECRET)))
    with pytest.raises(ValueError, match="Only this process uses TLS"):
        asyncio.run(exchanged(Credentials(_SECRET), encrypted))


def test_other_secret_is_named() -> None:
    with pytest.raises(ValueError, match="do not have the same secret"):
        asyncio.run(exchanged(Credentials(_SECRET), Credentials()))


def test_port_without_a_listener_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(ConnectionRefusedError):
        asyncio.run(reach(port, Credentials()))


def test_socket_that_connects_to_itself_is_closed(monkeypatch) -> None:
    """TCP does that if the system chooses the port for the client, and nothing listens there."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

    class Bound(socket.socket):
        def __init__(self, *arguments: int) -> None:
            super().__init__(*arguments)
            self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self.bind(("127.0.0.1", port))

    async def dial() -> None:
        monkeypatch.setattr(socket, "socket", Bound)
        try:
            await reach(port, Credentials())
        finally:
            monkeypatch.undo()

    with pytest.raises(ConnectionRefusedError, match="refused"):
        asyncio.run(dial())
    socket.create_server(("127.0.0.1", port)).close()


def test_silent_program_is_given_up_after_the_limit() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(UnansweredError, match=r"no answer within 0.2 s"):
            asyncio.run(reach(port, Credentials(), limit_s=0.2))
