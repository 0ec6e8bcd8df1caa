"""Authenticated connections as asyncio streams."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl

from stratagem.errors import explain
from stratagem.group.authentication.secret import Credentials, prove

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


_CONFIRMED = b"\1"


class UnansweredError(ConnectionError):
    """A port accepts connections, but does not complete the handshake."""


async def connect(
    host: str,
    port: int,
    credentials: Credentials,
    claim: str,
    *,
    purpose: str,
    server: str,
    limit_s: float,
) -> Streams:
    """Connects to a `Gate` of the same purpose; `server` names it in messages.

    Raises OSError if the host cannot be reached within `limit_s`, UnansweredError if the handshake
    takes longer, ValueError if another program answers, or one with other credentials.
    """
    connection = await reach(
        host, port, credentials, claim, purpose=purpose, server=server, limit_s=limit_s
    )
    try:
        async with asyncio.timeout(limit_s):
            try:
                return await open_streams(connection, credentials, is_server=False)
            except (ssl.SSLError, asyncio.IncompleteReadError, ConnectionError) as error:
                raise _refused(server, error) from error
    except BaseException as error:
        connection.close()
        if isinstance(error, OSError):
            raise _unanswered(error, limit_s) from error
        raise


async def reach(
    host: str,
    port: int,
    credentials: Credentials,
    claim: str,
    *,
    purpose: str,
    server: str,
    limit_s: float,
) -> socket.socket:
    """Returns an authenticated socket, which is not blocking; arguments as for `connect`.

    Raises as `connect`.
    """
    async with asyncio.timeout(limit_s):
        connection = await _dial(host, port)
    try:
        async with asyncio.timeout(limit_s):
            await prove(
                connection, credentials.key(purpose), credentials.mode, claim, server=server
            )
    except BaseException as error:
        connection.close()
        if isinstance(error, OSError):
            raise _unanswered(error, limit_s) from error
        raise
    return connection


def _unanswered(error: OSError, limit_s: float) -> UnansweredError:
    return UnansweredError(str(error) or f"no answer within {limit_s:g} s")


async def open_streams(
    connection: socket.socket, credentials: Credentials, *, is_server: bool
) -> Streams:
    """Returns the streams of an authenticated socket, encrypted if there are certificates."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    certificates = credentials.certificates
    if is_server:
        transport, _ = await loop.connect_accepted_socket(
            lambda: protocol, connection, ssl=certificates and certificates.server
        )
    else:
        transport, _ = await loop.create_connection(
            lambda: protocol,
            sock=connection,
            ssl=certificates and certificates.client,
            server_hostname=certificates and "",
        )
    writer = asyncio.StreamWriter(transport, protocol, reader, loop)
    if certificates is not None and is_server:
        writer.write(_CONFIRMED)
    elif certificates is not None:  # TLS 1.3 accepts the client's certificate after the handshake
        await reader.readexactly(len(_CONFIRMED))
    return reader, writer


def close_now(writer: asyncio.StreamWriter) -> None:
    """Closes a connection without waiting for the other side, as TLS does by itself."""
    try:
        is_encrypted = writer.get_extra_info("ssl_object") is not None
    except AttributeError:  # in Python 3.11: TLS that is closed already
        return
    if is_encrypted:
        writer.transport.abort()
    else:
        writer.close()


async def _dial(host: str, port: int) -> socket.socket:
    loop = asyncio.get_running_loop()
    errors: list[OSError] = []
    for family, kind, protocol, _, address in await loop.getaddrinfo(
        host, port, type=socket.SOCK_STREAM
    ):
        connection = socket.socket(family, kind, protocol)
        try:
            connection.settimeout(0)
            await loop.sock_connect(connection, address)
            # Without a listener, TCP may connect a socket to itself, which then holds the port.
            if connection.getsockname() != connection.getpeername():
                return connection
            refused = errno.ECONNREFUSED
            errors.append(ConnectionRefusedError(refused, os.strerror(refused)))
        except OSError as error:
            errors.append(error)
        except BaseException:
            connection.close()
            raise
        connection.close()
    raise errors[0]


def _refused(server: str, error: Exception) -> ValueError:
    return ValueError(
        explain(
            f"TLS with {server} failed: {error}.",
            expected="certificates of one authority on all processes.",
            fix="compare the files in STRATAGEM_TLS_DIR of both.",
            code="SG516",
        )
    )
