"""Connections to all servers of a cluster, shared by threads."""

from __future__ import annotations

import contextlib
import itertools
import socket
from collections.abc import Sequence
from typing import Any

from stratagem.errors import UnavailableError
from stratagem.group.transport.keys import ClusterKeys, load_zmq
from stratagem.group.transport.server_connections import Peer, ServerConnection
from stratagem.group.transport.shared_memory import DEFAULT_LIMITS, MemoryLimits
from stratagem.messages import explain

_MAX_WAKES = 4096


class ConnectionPool:
    """Connections that no thread uses; each server gets as many as it has requests at once."""

    def __init__(
        self, keys: ClusterKeys, peers: Sequence[Peer], limits: MemoryLimits = DEFAULT_LIMITS
    ) -> None:
        zmq = load_zmq()
        self._context: Any = zmq.Context()
        self._context.max_sockets = self._context.get(zmq.SOCKET_LIMIT)  # the default is 1023
        self._keys = keys
        self._peers = peers
        self._limits = limits
        self._unused: list[list[ServerConnection]] = [[] for _ in peers]

    def take(self, server: int) -> ServerConnection:
        """Returns an unused connection to a server, or a new one."""
        try:
            return self._unused[server].pop()
        except IndexError:
            return ServerConnection(self._context, self._keys, self._peers[server], self._limits)

    def give_back(self, server: int, connection: ServerConnection) -> None:
        """Keeps a connection for the next thread."""
        self._unused[server].append(connection)

    def close(self) -> None:
        """Closes all unused connections."""
        for connection in itertools.chain.from_iterable(self._unused):
            connection.close()

    def end(self) -> None:
        """Waits until all connections are closed, and stops the I/O thread."""
        self._context.term()


class ConnectionSet:
    """Connections of one thread while it waits for answers."""

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool
        self._connections: dict[int, ServerConnection] = {}
        self._is_ended = False
        # ZeroMQ sockets are not thread-safe: other threads wake the owner through this pair.
        self.woken, self._waker = socket.socketpair()
        for end in (self.woken, self._waker):
            end.settimeout(0)

    def to(self, server: int) -> ServerConnection:
        """Returns a connection to a server by the fastest known transport."""
        connection = self._connections.get(server)
        if connection is None:
            connection = self._connections[server] = self._pool.take(server)
        if not connection.is_at_best:
            connection.reopen()
        return connection

    def release(self) -> None:
        """Gives all connections back for use by other threads."""
        for server, connection in self._connections.items():
            self._pool.give_back(server, connection)
        self._connections.clear()

    def drop(self, server: int) -> None:
        """Closes the connection to a server; late answers are lost."""
        self._connections.pop(server).close()

    def wake(self) -> None:
        """Makes the thread that uses the set check for changes. Call from other threads."""
        with contextlib.suppress(BlockingIOError):  # full: it wakes anyway
            self._waker.send(b"\0")

    def note_woken(self) -> None:
        """Consumes the signals of `wake`."""
        with contextlib.suppress(BlockingIOError):
            self.woken.recv(_MAX_WAKES)

    def end(self) -> None:
        """Makes the thread that uses the set stop waiting. Call from other threads."""
        self._is_ended = True
        self.wake()

    def require_open(self) -> None:
        """Raises UnavailableError after `end`."""
        if self._is_ended:
            raise closed()

    def close(self) -> None:
        """Closes all connections."""
        for server in list(self._connections):
            self.drop(server)
        self.woken.close()
        self._waker.close()


def closed() -> UnavailableError:
    """Returns the error for requests on closed connections."""
    return UnavailableError(
        explain(
            "The connections to the servers were closed before a request was answered.",
            expected="connections that stay open until all requests are answered.",
            fix="stop the threads that send requests before closing the connections.",
        )
    )
