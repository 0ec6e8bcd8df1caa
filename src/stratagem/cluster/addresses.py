"""Addresses of tasks (host:port), and the ports of this machine."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import secrets
import socket
from pathlib import Path

from stratagem.errors import invalid

_MAX_PORT = 65535
_LOOPBACK_NAMES = {"localhost", "localhost.localdomain", "ip6-localhost", "ip6-loopback"}


def without_scheme(address: str) -> str:
    """Returns an address without a prefix such as `grpc://`."""
    return address.rpartition("://")[2]


def split_address(address: str) -> tuple[str, int]:
    """Splits an address into a lower-case host without brackets and a port.

    `address` is `host:port` or `[IPv6]:port`, with or without a prefix such as `grpc://`. Raises
    ValueError without a host, or without a port from 1 to 65535.
    """
    host, _, port = without_scheme(address).rpartition(":")
    is_port = port.isascii() and port.isdecimal() and 1 <= int(port) <= _MAX_PORT
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not is_port or not bare or (":" in bare and bare == host):
        raise invalid(
            f"Address {address!r} is not of the form host:port.",
            expected=f"a host and a port from 1 to {_MAX_PORT}, with IPv6 hosts in brackets.",
            fix="write host0:2222, 10.0.0.1:2222 or [fd00::1]:2222.",
            code="SG503",
        )
    return bare.lower(), int(port)


def join_address(host: str, port: int | str) -> str:
    """Returns `host:port`, with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def with_port(address: str, port: int) -> str:
    """Returns `host:port` of an address whose port may be omitted; raises ValueError."""
    place = without_scheme(address.strip())
    host = place.rpartition(":")[0]
    if host and (":" not in host or host.endswith("]")):  # else an IPv6 host alone
        split_address(place)
        return place
    return join_address(place.removeprefix("[").removesuffix("]"), port)


def is_loopback(host: str) -> bool:
    """True for localhost and its addresses, at which no other machine can reach this one.

    False for 0.0.0.0 and `::`: a port there is open to every network of this machine.
    """
    if host in _LOOPBACK_NAMES:
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return address.is_loopback


def is_every_interface(host: str) -> bool:
    """True for 0.0.0.0 and `::`, which can be listened at, and are no address for others."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


# Ray has 10,001 to 19,999 for clients and workers.
_FIRST_PORT = 20_000
# Ports from here on are given to outgoing connections by Linux, unless the file says otherwise.
_FIRST_EPHEMERAL_PORT = 32_768
_RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_NUM_TRIES = 100


def free_ports(num_ports: int) -> tuple[int, ...]:
    """Returns distinct free ports of this machine; use them soon, as others may take them.

    They are outside the range of outgoing connections: these would take some of them at once on a
    busy machine.
    """
    end = _first_ephemeral_port()
    # All are open at once, so no port is returned twice.
    with contextlib.ExitStack() as opened:
        sockets = [opened.enter_context(socket.socket()) for _ in range(num_ports)]
        return tuple(_bound_port(one, end) for one in sockets)


def _first_ephemeral_port() -> int:
    try:
        return int(_RANGE_FILE.read_text(encoding="ascii").split()[0])
    except OSError:
        return _FIRST_EPHEMERAL_PORT


def _bound_port(one: socket.socket, end: int) -> int:
    """Binds a socket to a random free port below `end`, or to any if there is none."""
    for _ in range(_NUM_TRIES if end > _FIRST_PORT else 0):
        # Not `random`: programs that start together may have the same seed.
        port = _FIRST_PORT + secrets.randbelow(end - _FIRST_PORT)
        try:
            one.bind(("", port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            return port
    one.bind(("", 0))
    return one.getsockname()[1]


UnknownHostError = socket.gaierror
"""The OSError of a host name without an address."""


def listening_error(address: str) -> OSError | None:
    """Returns why this machine cannot listen at host:port; None if it can."""
    host, port = split_address(address)
    try:
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(place)
    except OSError as error:
        return error
    return None


def is_in_use(address: str) -> bool:
    """True if a process of this machine listens at an address; False for one of another machine."""
    error = listening_error(address)
    return error is not None and error.errno == errno.EADDRINUSE


def ip_address(host: str) -> str:
    """Returns the IP address of a host. Raises OSError for an unknown one."""
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return socket.gethostbyname(host)


def own_name() -> str:
    """Returns the name of this machine, with its domain if it has one."""
    return socket.getfqdn()


# The first bytes of a client, which a server answers without authentication: the preface of HTTP/2
# with empty settings, and a request. A server with TLS closes the connection, which is an answer.
GRPC = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)
HTTP = b"GET / HTTP/1.0\r\n\r\n"

_PROBE_S = 1.0


def probe(address: str, greeting: bytes = GRPC) -> str:
    """Greets a service at host:port; returns "there", "refused", or why the result is unknown."""
    try:
        with socket.create_connection(split_address(address), timeout=_PROBE_S) as connection:
            connection.sendall(greeting)
            connection.recv(1)
    except ConnectionRefusedError:
        return "refused"
    except (ConnectionResetError, BrokenPipeError):
        return "there"
    except TimeoutError:
        return f"no answer within {_PROBE_S:g} s"
    except OSError as error:
        return str(error)
    return "there"
