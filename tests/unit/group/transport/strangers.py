"""Peers that speak ZeroMQ's protocol by hand, without the keys of a cluster.

Source: ZeroMQ RFC 23, ZMTP 3.1.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from pathlib import Path

__all__ = ["connect", "flood", "greeting", "is_closed", "long_frame", "resident_bytes"]

_COMMAND, _LONG = 4, 2
_PIECE_BYTES = 2**16


def connect(address: str) -> socket.socket:
    """A connection to a server's TCP address."""
    host, _, port = address.partition(" ")[0].removeprefix("tcp://").rpartition(":")
    return socket.create_connection((host, int(port)), timeout=120)


def greeting(mechanism: bytes) -> bytes:
    """The first bytes of a client."""
    return b"\xff" + bytes(8) + b"\x7f\x03\x01" + mechanism.ljust(20, b"\0") + bytes(32)


def long_frame(size_bytes: int, *, is_command: bool = True) -> bytes:
    """The head of a frame of that size."""
    return bytes([(_COMMAND if is_command else 0) | _LONG]) + size_bytes.to_bytes(8, "big")


def flood(connection: socket.socket, size_bytes: int) -> int:
    """Sends so many bytes, or as many as are taken before the connection is closed."""
    sent, piece = 0, b"\5" * _PIECE_BYTES
    with contextlib.suppress(OSError):
        while sent < size_bytes:
            sent += connection.send(piece)
    return sent


def is_closed(connection: socket.socket, limit_s: float) -> bool:
    """True if the other side closes the connection in time."""
    deadline_s = time.monotonic() + limit_s
    with contextlib.suppress(OSError):
        while (left_s := deadline_s - time.monotonic()) > 0:
            connection.settimeout(left_s)
            if not connection.recv(4096):
                return True
        return False
    return time.monotonic() < deadline_s  # reset, unless the time is over


def resident_bytes(pid: int) -> int:
    """Resident memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
