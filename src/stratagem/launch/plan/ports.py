"""Free ports of this machine."""

from __future__ import annotations

import contextlib
import socket

__all__ = ["free_ports"]


def free_ports(num_ports: int) -> tuple[int, ...]:
    """Returns distinct free ports of this machine; use them soon, as others may take them."""
    # All are open at once, so no port is returned twice.
    with contextlib.ExitStack() as opened:
        sockets = [opened.enter_context(socket.socket()) for _ in range(num_ports)]
        for one in sockets:
            one.bind(("", 0))
        return tuple(one.getsockname()[1] for one in sockets)
