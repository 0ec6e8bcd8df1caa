"""Parsing and formatting of task addresses (host:port)."""

from __future__ import annotations

import ipaddress

from stratagem.errors import explain

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
        raise ValueError(
            explain(
                f"Address {address!r} is not of the form host:port.",
                expected=f"a host and a port from 1 to {_MAX_PORT}, with IPv6 hosts in brackets.",
                fix="write host0:2222, 10.0.0.1:2222 or [fd00::1]:2222.",
                code="SG503",
            )
        )
    return bare.lower(), int(port)


def join_address(host: str, port: int | str) -> str:
    """Returns `host:port`, with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """True for localhost, its addresses, and 0.0.0.0, which other machines cannot reach."""
    if host in _LOOPBACK_NAMES:
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified
