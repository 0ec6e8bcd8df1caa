"""A line between a client and a server that loses what is on it."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from urllib.parse import urlsplit

_TICK_S = 0.05
_CHUNK_BYTES = 1 << 16


class CutLine:
    """Forwards bytes both ways, until it is told to lose them.

    Args:
        address: of the server, as ZeroMQ writes it.
        is_held: whether it forwards nothing until it is released.
    """

    def __init__(self, address: str, *, is_held: bool = False) -> None:
        parts = urlsplit(address)
        self._server = (parts.hostname, parts.port)
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listening.getsockname()[1]}"
        self._lost_way: str | None = None
        self.has_lost = threading.Event()
        self._is_to_cut = threading.Event()
        self._is_to_hang_up = threading.Event()
        self._has_hung_up = threading.Event()
        self._is_closed = threading.Event()
        self._pairs: dict[socket.socket, tuple[socket.socket, str]] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listening, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._forward, daemon=True)
        if not is_held:
            self.release()

    def release(self) -> None:
        """Begins to forward, also what came before."""
        self._thread.start()

    def lose(self, way: str) -> None:
        """Forwards no more that goes this way, "there" or "back"; `has_lost` tells when it has."""
        self._lost_way = way

    def cut(self) -> None:
        """Breaks the connections; new ones are whole."""
        self._lost_way = None
        self._is_to_cut.set()

    def hang_up(self, limit_s: float) -> bool:
        """Ends the connections, and returns whether the server has noticed within a limit."""
        self._is_to_hang_up.set()
        return self._has_hung_up.wait(limit_s)

    def close(self) -> None:
        self._is_closed.set()
        self._thread.join()

    def _forward(self) -> None:
        while not self._is_closed.is_set():
            if self._is_to_cut.is_set():
                self._is_to_cut.clear()
                self._close_pairs()
            if self._is_to_hang_up.is_set():
                self._is_to_hang_up.clear()
                for other, way in self._pairs.values():
                    if way == "there":
                        other.shutdown(socket.SHUT_WR)
            for key, _ in self._selector.select(_TICK_S):
                if key.fileobj is self._listening:
                    self._accept()
                elif key.fileobj in self._pairs:
                    self._move(key.fileobj)
        self._close_pairs()
        self._selector.close()
        self._listening.close()

    def _accept(self) -> None:
        client, _ = self._listening.accept()
        try:
            server = socket.create_connection(self._server)
        except OSError:
            client.close()
            return
        self._pairs[client], self._pairs[server] = (server, "there"), (client, "back")
        for end in (client, server):
            self._selector.register(end, selectors.EVENT_READ)

    def _move(self, end: socket.socket) -> None:
        other, way = self._pairs[end]
        try:
            data = end.recv(_CHUNK_BYTES)
        except OSError:
            data = b""
        if not data:
            self._close_pair(end)
            self._has_hung_up.set()
        elif way == self._lost_way:
            self.has_lost.set()
        else:
            with contextlib.suppress(OSError):
                other.sendall(data)

    def _close_pair(self, end: socket.socket) -> None:
        for one in (end, self._pairs[end][0]):
            del self._pairs[one]
            self._selector.unregister(one)
            one.close()

    def _close_pairs(self) -> None:
        while self._pairs:
            self._close_pair(next(iter(self._pairs)))
