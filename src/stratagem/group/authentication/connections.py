"""Authenticated connections: listening sockets, streams, messages and their values, tunnels."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import errno
import ipaddress
import json
import logging
import os
import re
import socket
import ssl
from collections.abc import Awaitable, Callable, Collection, Generator
from types import NoneType
from typing import Any

import numpy as np

from stratagem.cluster.addresses import is_loopback
from stratagem.errors import explain, invalid
from stratagem.group.authentication.secret import Credentials, prove
from stratagem.group.verdict import Activity

# Validation of messages between process 0 and the others.
#
# A run may have no secret, and any program on its hosts can then connect to the port of a group.
# So invalid messages are rejected here. Later code relies on every field and its type.


# Framed JSON messages between processes that coordinate over asyncio streams.
#
# A frame is a four-byte length and that many bytes of JSON. Nothing is ever unpickled.

MAX_FRAME_BYTES = 256 * 2**20


def frame(message: dict[str, Any]) -> bytes:
    """Returns a JSON message as a frame."""
    text = json.dumps(message, separators=(",", ":")).encode()
    return len(text).to_bytes(4, "big") + text


async def read_frame(
    reader: asyncio.StreamReader, max_bytes: int = MAX_FRAME_BYTES
) -> dict[str, Any]:
    """Reads one message; raises ConnectionError if the connection or frame is broken."""
    try:
        size = int.from_bytes(await reader.readexactly(4), "big")
        if size > max_bytes:
            raise ConnectionError(f"received a frame of {size} bytes, which is too large")
        return framed(await reader.readexactly(size))
    except ConnectionError:
        raise
    except (asyncio.IncompleteReadError, OSError) as error:
        raise ConnectionError(f"closed by the other side ({error})") from error


def framed(data: bytes) -> dict[str, Any]:
    """Returns the message in a frame, without its length; raises ConnectionError for others."""
    try:
        message = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ConnectionError(f"received no message ({error})") from error
    if not isinstance(message, dict):
        raise ConnectionError("received a frame that holds no JSON object")
    return message


# It names the cluster, which may have thousands of tasks.
MAX_HELLO_BYTES = 2**20

# The shape of a value: a type, a set of types, a dict of fields, a list of one shape, or a tuple of
# the shapes of a list's parts. Unlike in Python, a bool is not an int.
_ANYTHING = {NoneType, bool, int, float, str, list, dict}
_SECONDS = {NoneType, int, float}
_SHAPES: dict[str, dict[str, Any]] = {
    "hello": {
        "process_id": int,
        "num_processes": int,
        "restart": int,
        "facts": {"host": str, "pid": int, "address": str, "same": dict},
    },
    "beat": {"position": str, "name": str, "step": int, "moves": int, "calls": int},
    # Of a note: a variable's number and path, a digest, and a place of the program.
    "assigned": {"calls": int, "digest": int, "notes": [(int, str, int, str)]},
    "exchange": {
        "stream": str,
        "number": int,
        "name": str,
        "value": _ANYTHING,
        "limit_s": _SECONDS,
        "setting": str,
    },
    "leave": {"stream": str},
    "announce": {"topic": str, "numbers": [int]},
    "error": {"text": str},
    "gone": {},
}
_SHAPES_OF_ANSWERS: dict[str, dict[str, Any]] = {
    "welcome": {"address": str},
    "busy": {},
    "progress": {"num_missing": int, "missing": str},
    "beat": {},
    # Of a run: a value, and the number of successive processes that sent it.
    "exchanged": {"stream": str, "number": int, "runs": [(_ANYTHING, int)]},
    "abandoned": {"stream": str, "number": int, "by": [str]},
    # A topic, a process id, and numbers.
    "announced": {"announcements": [(str, int, [int])]},
    "agreed": {"count": int},
    "gone": {},
    "verdict": {
        "error": str,
        "message": str,
        "lost": {NoneType, str},
        "silent_s": _SECONDS,
        "how": str,
        "step": {NoneType, int},
    },
}
_ACTIVITIES = frozenset(kind.value for kind in Activity)


async def read_message(
    reader: asyncio.StreamReader, max_bytes: int = MAX_FRAME_BYTES
) -> dict[str, Any]:
    """Reads a message; raises ConnectionError if it is invalid or the connection is closed."""
    message = await _read(reader, _SHAPES, max_bytes)
    is_unknown = message["kind"] == "beat" and message["position"] not in _ACTIVITIES
    if is_unknown or (message["kind"] == "assigned" and not message["notes"]):
        raise ConnectionError(f"received a message of kind {message['kind']!r} with invalid fields")
    return message


async def read_answer(reader: asyncio.StreamReader, num_processes: int) -> dict[str, Any]:
    """Reads a message of process 0; raises ConnectionError as `read_message`."""
    message = await _read(reader, _SHAPES_OF_ANSWERS)
    if message["kind"] == "exchanged":
        counts = [count for _, count in message["runs"]]
        if sum(counts) != num_processes or min(counts, default=0) < 1:
            raise ConnectionError("received the values of another number of processes")
    return message


async def _read(
    reader: asyncio.StreamReader,
    shapes: dict[str, dict[str, Any]],
    max_bytes: int = MAX_FRAME_BYTES,
) -> dict[str, Any]:
    message = await read_frame(reader, max_bytes)
    kind = message.get("kind")
    if not isinstance(kind, str) or kind not in shapes or not _fits(message, shapes[kind]):
        raise ConnectionError(f"received an unknown message: {str(message)[:200]}")
    return message


def _fits(value: Any, shape: Any) -> bool:
    """Returns True if a value has a shape; it may have more fields."""
    if isinstance(shape, dict):
        has_fields = isinstance(value, dict) and shape.keys() <= value.keys()
        return has_fields and all(_fits(value[name], one) for name, one in shape.items())
    if isinstance(shape, list):
        return isinstance(value, list) and all(_fits(one, shape[0]) for one in value)
    if isinstance(shape, tuple):
        has_parts = isinstance(value, list) and len(value) == len(shape)
        return has_parts and all(map(_fits, value, shape))
    return type(value) in (shape if isinstance(shape, set) else {shape})


# Listening sockets at the addresses that a cluster names, and at no others.


_logger = logging.getLogger(__name__)

_BACKLOG = 256
_ALL_INTERFACES = ""


def listening_sockets(
    host: str, port: int, hosts: Collection[str] = (), *, may_be_everywhere: bool = True
) -> list[socket.socket]:
    """Returns sockets that listen at the addresses of `host`; raises OSError.

    `hosts` are those of the whole cluster, if they are known. If `host` is no address of this
    machine, as behind a Service of Kubernetes, they listen on all interfaces, which is logged, or
    there are none.
    """
    addresses = local_addresses(host, hosts)
    if addresses == [_ALL_INTERFACES]:
        if not may_be_everywhere:
            return []
        _logger.warning(
            "Listening on all interfaces: %s of the cluster is no address of this machine at which "
            "others reach it.",
            host,
        )
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(_listen(address, port)) for address in addresses]
        stack.pop_all()
        return sockets


def local_addresses(host: str, hosts: Collection[str] = ()) -> list[str]:
    """Returns the addresses of this machine that `host` names; [""] for all interfaces."""
    own = [address for address in _resolved(host) if _is_own(address)]
    if is_loopback(host):  # it may have no secret, so whatever the name resolves to
        return [one for one in own if ipaddress.ip_address(one).is_loopback] or ["127.0.0.1"]
    # Debian's /etc/hosts gives a host's own name 127.0.1.1, and others reach it elsewhere.
    if own and all(map(is_loopback, own)):
        is_one_machine = hosts and all(any(map(is_loopback, _resolved(one))) for one in hosts)
        own = own if is_one_machine else []
    return own or [_ALL_INTERFACES]


def _resolved(host: str) -> list[str]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def _is_own(address: str) -> bool:
    try:
        _listen(address, 0).close()
    except OSError as error:
        return error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
    return True


def _listen(address: str, port: int) -> socket.socket:
    if address == _ALL_INTERFACES:
        if socket.has_dualstack_ipv6():
            with contextlib.suppress(OSError):  # IPv6 may be disabled
                return socket.create_server(
                    ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG
                )
        return socket.create_server(("", port), backlog=_BACKLOG)
    is_v6 = ipaddress.ip_address(address.partition("%")[0]).version == 6
    family = socket.AF_INET6 if is_v6 else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=_BACKLOG)


# Authenticated connections as asyncio streams.


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
    with _closed_unless_answered(connection, limit_s):
        async with asyncio.timeout(limit_s):
            try:
                return await open_streams(connection, credentials, is_server=False)
            except (ssl.SSLError, asyncio.IncompleteReadError, ConnectionError) as error:
                raise _refused(server, error) from error


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
    with _closed_unless_answered(connection, limit_s):
        async with asyncio.timeout(limit_s):
            key, mode = credentials.key(purpose), credentials.mode
            await prove(connection, key, mode, claim, server=server)
    return connection


@contextlib.contextmanager
def _closed_unless_answered(connection: socket.socket, limit_s: float) -> Generator[None]:
    """Closes a connection after an error; an OSError becomes UnansweredError."""
    try:
        yield
    except BaseException as error:
        connection.close()
        if isinstance(error, OSError):
            raise UnansweredError(str(error) or f"no answer within {limit_s:g} s") from error
        raise


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
    return invalid(
        f"TLS with {server} failed: {error}.",
        expected="certificates of one authority on all processes.",
        fix="compare the files in STRATAGEM_TLS_DIR of both.",
        code="SG516",
    )


# Values of messages between the processes of a group, as JSON.
#
# Nothing is ever unpickled.


_STRINGS = re.compile(r"[<>|][US]\d{1,6}")


def encode(value: object) -> Any:
    """Returns a value as JSON, for `decode`; raises TypeError for unsupported types.

    Supports None, bools, numbers, strings, bytes, NumPy arrays and scalars, and lists, tuples and
    dicts with string keys of these.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value.item() if isinstance(value, np.generic) else value
    if isinstance(value, list):
        return [encode(item) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [encode(item) for item in value]}
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, np.ndarray | np.generic) and _is_numeric(value.dtype):
        data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        return {"array": [value.dtype.name, list(value.shape), data]}
    if isinstance(value, np.ndarray) and value.dtype.kind in "US":
        rows: list[Any] = value.ravel().tolist()
        return {"strings": [value.dtype.str, list(value.shape), [encode(row) for row in rows]]}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: encode(item) for key, item in value.items()}}
    raise TypeError(
        explain(
            f"{value!r} of type {type(value).__name__} cannot be sent to other processes.",
            expected="None, bools, numbers, strings, bytes, NumPy arrays, and lists, tuples and "
            "dicts with string keys of these. Nothing is pickled.",
            fix="convert it to these types, or send only the parts that others need.",
        )
    )


def _is_numeric(dtype: np.dtype[Any]) -> bool:
    """True for numeric dtypes, including extensions such as bfloat16."""
    is_added = dtype.kind == "V" and not dtype.name.startswith("void")
    return dtype.isnative and (dtype.kind in "biufc" or is_added)


def decode(value: object) -> Any:
    """Returns the value that `encode` received; raises ValueError for anything else."""
    try:
        return _decoded(value)
    except (AttributeError, MemoryError, OverflowError, RecursionError, TypeError) as error:
        raise ValueError(f"received no encoded value: {error}") from error


def _decoded(value: object) -> Any:
    if isinstance(value, list):
        return [_decoded(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tuple":
        return tuple(_decoded(item) for item in content)
    if kind == "bytes":
        return base64.b64decode(content)
    if kind == "array":
        name, shape, data = content
        # NumPy would parse anything else as an expression.
        dtype = np.dtype(name) if str(name).isidentifier() else None
        if dtype is None or not _is_numeric(dtype):
            raise ValueError(f"an array of {name!r} is no encoded value")
        return np.frombuffer(base64.b64decode(data), dtype).reshape(shape).copy()
    if kind == "strings":
        name, shape, rows = content
        if not _STRINGS.fullmatch(str(name)):
            raise ValueError(f"an array of {name!r} is no encoded value")
        return np.array([_decoded(row) for row in rows], str(name)).reshape(shape)
    return {key: _decoded(item) for key, item in content.items()}


# Tunnels to JAX's coordination service through the port of the group.
#
# JAX terminates a process, without an error to catch, as soon as its connection to the service
# breaks, before anything can report that process 0 died. So each process connects to a local port,
# which stays open. Process 0 also needs only one reachable port, which authenticates: the service
# itself listens on 127.0.0.1 and has no authentication.


_CHUNK_BYTES = 2**16
_RETRY_S = 0.05
_START_LIMIT_S = 60.0


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Forwards data until one side closes."""
    while data := await reader.read(_CHUNK_BYTES):
        writer.write(data)
        await writer.drain()


async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int) -> None:
    """Connects a tunnel to the service on this host, as soon as it listens."""
    async with asyncio.timeout(_START_LIMIT_S):
        while True:
            try:
                inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", port)
                break
            except OSError:
                await asyncio.sleep(_RETRY_S)
    try:
        directions = [
            asyncio.create_task(_pump(reader, inner_writer)),
            asyncio.create_task(_pump(inner_reader, writer)),
        ]
        await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
        for direction in directions:
            direction.cancel()
        await asyncio.gather(*directions, return_exceptions=True)
    finally:
        inner_writer.close()


async def open_coordination_port(connect: Callable[[], Awaitable[Streams]]) -> asyncio.Server:
    """Opens a port on 127.0.0.1 that leads to the service of process 0.

    `connect` makes an authenticated connection to process 0. This side never closes a connection:
    if process 0 is lost, requests get no answer.
    """

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # If process 0 cannot be reached now, JAX's client connects again.
        with contextlib.closing(writer), contextlib.suppress(OSError, ValueError):
            outer_reader, outer_writer = await connect()
            # Closed by `with`, because a group that ends cancels the wait for `back`, too.
            with contextlib.closing(outer_writer):
                back = asyncio.create_task(_pump(outer_reader, writer))
                try:
                    await _pump(reader, outer_writer)
                except OSError:  # process 0 is lost: keep the connection, without answers
                    while await reader.read(_CHUNK_BYTES):
                        pass
                finally:
                    back.cancel()
                    await asyncio.gather(back, return_exceptions=True)

    return await asyncio.start_server(accept, "127.0.0.1", 0)
