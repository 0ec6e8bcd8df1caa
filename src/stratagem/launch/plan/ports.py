"""Ports on which nothing listens."""

from __future__ import annotations

import contextlib
import socket

__all__ = ["free_ports"]


def free_ports(num_ports: int) -> tuple[int, ...]:
    """Returns ports that are free on every address of this machine, no two the same.

    The system chooses them. Between this call and the use another program can take one: let as
    little as possible happen in between.

    Args:
        num_ports: how many.

    Returns:
        The ports.

    Example:
        >>> len(set(free_ports(3)))
        3
    """
    # All are open at once, so that none is given out twice.
    with contextlib.ExitStack() as opened:
        sockets = [opened.enter_context(socket.socket()) for _ in range(num_ports)]
        for one in sockets:
            one.bind(("", 0))
        return tuple(one.getsockname()[1] for one in sockets)
