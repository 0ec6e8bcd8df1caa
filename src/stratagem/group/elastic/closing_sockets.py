"""The end of sockets that another thread may be using."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterable


def close_after_use(sockets: Iterable[socket.socket], use: threading.RLock) -> None:
    """Ends connections, and closes them once no thread holds `use`.

    The number of a closed file belongs to the next one that any thread opens: a thread that still
    reads or writes would do so on a connection of another.
    """
    sockets = list(sockets)
    for one in sockets:
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)  # wakes the thread that uses it
    with use:
        for one in sockets:
            one.close()
