"""Free ports of this machine."""

from __future__ import annotations

import contextlib
import errno
import secrets
import socket
from pathlib import Path

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
