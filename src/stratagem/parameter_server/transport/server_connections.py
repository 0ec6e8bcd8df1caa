"""Lines to servers: what is known of a server, and the sockets that lead to it."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import threading
from collections.abc import Sequence
from typing import Any

from stratagem.errors import UnavailableError
from stratagem.messages import explain
from stratagem.parameter_server.transport.keys import ClusterKeys, load_zmq
from stratagem.parameter_server.transport.local_sockets import LocalSocket
from stratagem.parameter_server.transport.shared_memory import ClientMemory, is_placed, large_bytes
from stratagem.parameter_server.transport.wire import (
    HERE,
    PING,
    SHARE,
    SHARED,
    WHERE,
    in_parts,
    is_message,
)

__all__ = ["ConnectionSet", "Peer", "Place", "ServerConnection", "closed"]

_NO_NUMBER = bytes(8)
_MAX_WAKES = 4096
_LOST_MS = 5000


@dataclasses.dataclass(frozen=True)
class Place:
    """Address of a server: its port, and a local socket if there is one.

    Args:
        address: of its TCP port.
        local: its Unix socket, once it has told of one that can be reached from here.
    """

    address: str
    local: LocalSocket | None = None


class Peer:
    """State of a server, shared by all threads.

    Args:
        name: for messages.
        address: where it is.
    """

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self.place = Place(address)
        self.lost: str | None = None  # the reason why it was given up
        self.num_losses = 0
        self._last_reason = ""
        self.located_s = float("-inf")  # when it was last asked where it is
        self._lock = threading.Lock()
        self._refused: set[LocalSocket] = set()

    def move(self, address: str) -> None:
        """Notes where it is now.

        Args:
            address: of its TCP port.
        """
        with self._lock:
            if self.place.address != address:
                self.place = Place(address)
            self.lost = None

    def abandon(self, reason: str) -> None:
        """Gives it up, until it is moved.

        Args:
            reason: why.
        """
        with self._lock:
            self.num_losses += 1
            self.lost = self._last_reason = reason

    def require_kept(self, num_losses: int | None = None) -> None:
        """Raises where it was given up.

        Args:
            num_losses: how often it had been given up when somebody began to wait for it; None for
                nobody.

        Raises:
            UnavailableError: it was.
        """
        reason = self.lost
        if num_losses is not None and num_losses != self.num_losses:  # it may be back since
            reason = self._last_reason
        if reason is not None:
            raise UnavailableError(
                explain(
                    f"{self.name} at {self.place.address} was given up: {reason}",
                    expected="a process that runs.",
                    fix="look at why it ended; where it is started again, ask it then.",
                )
            )

    def note_local(self, address: str, local: LocalSocket) -> None:
        """Notes what a server has told of itself.

        Args:
            address: of the TCP port where it was asked.
            local: its Unix socket.
        """
        with self._lock:
            is_here = self.place.address == address and self.place.local != local
            if is_here and local not in self._refused and local.is_reachable():
                self.place = Place(address, local)

    def refuse_local(self, local: LocalSocket) -> None:
        """Goes back to TCP.

        Args:
            local: the Unix socket at which nobody answers any more.
        """
        with self._lock:
            self._refused.add(local)
            if self.place.local == local:
                self.place = Place(self.place.address)


class ServerConnection:
    """A socket to one server, for one thread at a time.

    Args:
        context: of ZeroMQ.
        keys: of the cluster.
        peer: the server.
    """

    def __init__(self, context: Any, keys: ClusterKeys, peer: Peer) -> None:
        self.peer = peer
        self._context = context
        self._keys = keys
        self._zmq = load_zmq()
        self.open()

    @property
    def is_at_best(self) -> bool:
        """True if it leads to the server's current address, by the fastest way."""
        return self.place == self.peer.place and not self.socket.closed

    @property
    def is_astray(self) -> bool:
        """True if it leads to an old address of the server."""
        now = self.peer.place
        has_moved = self.place.address != now.address
        return has_moved or (self.place.local is not None and self.place.local != now.local)

    def open(self) -> None:
        """Connects to where the server is now.

        Raises:
            zmq.ZMQError: that is no address.
        """
        place = self.peer.place
        new = self._context.socket(self._zmq.DEALER)
        try:
            new.linger = 0
            new.sndhwm = new.rcvhwm = 0
            # A machine that is gone neither refuses nor acknowledges: it may be back meanwhile.
            new.connect_timeout = new.tcp_maxrt = _LOST_MS
            if place.local is not None:
                place.local.unlock(new)
                new.connect(place.local.address)
            else:
                self._keys.unlock(new)
                new.connect(place.address)
                new.send_multipart([_NO_NUMBER, WHERE])
        except BaseException:
            new.close()
            raise
        self.socket: Any = new
        self.place = place
        self._has_heard = False
        self._memory: ClientMemory | None = None
        self._offered: ClientMemory | None = None
        self._may_share = place.local is not None
        self._request_bytes = self._answer_bytes = 0  # of the largest so far

    def reopen(self) -> None:
        """Connects to where the server is now, in place of where it was."""
        self.close()
        self.open()

    def close(self) -> None:
        """Takes back what was not sent yet."""
        self.socket.close()
        for memory in (self._memory, self._offered):
            if memory is not None:
                memory.close()

    def send(self, number: bytes, frames: Sequence[Any]) -> None:
        """Sends a request.

        Args:
            number: its number, which no other request has, of whatever client.
            frames: the request; their buffers must not change until it is answered.
        """
        self._request_bytes = max(self._request_bytes, large_bytes(frames))
        self._offer_memory()
        # One that is offered takes the place of the other at once, on the side of the server.
        if self._memory is not None and self._offered is None:
            frames = self._memory.placed(frames)
        self._tell([number, *in_parts(frames)])

    def ping(self, number: bytes, ping: bytes) -> None:
        """Asks whether a request is worked on.

        Args:
            number: of the request.
            ping: what comes back with the answer.
        """
        self._tell([number, PING, ping])

    def receive(self) -> tuple[bytes, list[Any]] | None:
        """Returns what has arrived.

        Returns:
            The number of a request, and frames; None where they tell something of the server.
        """
        number, *frames = self.socket.recv_multipart(copy=False)
        self._has_heard = True
        buffers = [frame.buffer for frame in frames]
        if self._memory is not None and is_placed(buffers):
            return number.bytes, self._memory.read(buffers)
        kind = None if is_message(buffers) else bytes(buffers[0])
        if kind is None:
            self._answer_bytes = max(self._answer_bytes, large_bytes(buffers))
        if kind not in (HERE, SHARED):
            return number.bytes, buffers
        details = [bytes(buffer) for buffer in buffers[1:]]
        if kind == SHARED:
            self._note_shared(is_shared=any(details))
        elif details:
            path, password = details
            self.peer.note_local(self.place.address, LocalSocket(path.decode(), password))
        return None

    def _tell(self, parts: list[Any]) -> None:
        # Whom the server has refused has no connection any more, and would wait for one for ever.
        # What is not sent is not answered: who waits for that finds the server lost.
        with contextlib.suppress(self._zmq.Again):
            self.socket.send_multipart(parts, self._zmq.NOBLOCK, copy=False)

    def _offer_memory(self) -> None:
        """Shares memory with a server on this machine, once there is something to go by it."""
        needed = self._request_bytes, self._answer_bytes
        if not self._may_share or self._offered is not None or not any(needed):
            return
        if self._memory is not None and self._memory.has_room(*needed):
            return
        try:
            self._offered = ClientMemory(*needed)
        except OSError:  # a faster way only
            self._may_share = False
            return
        self._tell([_NO_NUMBER, SHARE, self._offered.told])

    def _note_shared(self, *, is_shared: bool) -> None:
        """Uses, or leaves, the memory that was offered: the server has answered that."""
        former, new = self._memory, self._offered
        self._memory, self._offered = (new if is_shared else None), None
        self._may_share = is_shared
        for memory in (former, None if is_shared else new):  # the server has left the former, too
            if memory is not None:
                memory.close()

    def leave_dead_socket(self) -> None:
        """Goes back to TCP where nobody listens at the Unix socket any more: its server is lost.

        Else its server is busy; one that has come back has another Unix socket, and tells of it.
        """
        local = self.place.local
        if local is not None and not (self._has_heard and local.is_reachable()):
            self.peer.refuse_local(local)


class ConnectionSet:
    """Lines to all servers that one thread asks at a time.

    Args:
        context: of ZeroMQ.
        keys: of the cluster.
        peers: the servers.
    """

    def __init__(self, context: Any, keys: ClusterKeys, peers: Sequence[Peer]) -> None:
        self._context = context
        self._keys = keys
        self._peers = peers
        self._connections: dict[int, ServerConnection] = {}
        self._is_ended = False
        # Sockets of ZeroMQ are for one thread: this one is told by others to look after its own.
        self.woken, self._waker = socket.socketpair()
        for end in (self.woken, self._waker):
            end.settimeout(0)

    def to(self, server: int) -> ServerConnection:
        """Returns the connection to a server, by the fastest way that is known.

        Args:
            server: its index.
        """
        connection = self._connections.get(server)
        if connection is None:
            connection = self._connections[server] = ServerConnection(
                self._context, self._keys, self._peers[server]
            )
        elif not connection.is_at_best:
            connection.reopen()
        return connection

    def drop(self, server: int) -> None:
        """Closes the connection to a server; late answers to what was asked by it are not heard.

        Args:
            server: its index.
        """
        self._connections.pop(server).close()

    def wake(self) -> None:
        """Lets the thread that uses it look for what has changed; for other threads."""
        with contextlib.suppress(BlockingIOError):  # it is full: it wakes anyhow
            self._waker.send(b"\0")

    def note_woken(self) -> None:
        """Takes what `wake` has sent."""
        with contextlib.suppress(BlockingIOError):
            self.woken.recv(_MAX_WAKES)

    def end(self) -> None:
        """Lets the thread that uses it wait no more; for other threads."""
        self._is_ended = True
        self.wake()

    def require_open(self) -> None:
        """Raises where another thread has ended it.

        Raises:
            UnavailableError: one has.
        """
        if self._is_ended:
            raise closed()

    def close(self) -> None:
        """Closes all connections."""
        for server in list(self._connections):
            self.drop(server)
        self.woken.close()
        self._waker.close()


def closed() -> UnavailableError:
    """Returns the error of who asks, or waits, when the connections are closed."""
    return UnavailableError(
        explain(
            "An answer was asked for, or waited for, by connections that are closed.",
            expected="connections that are open until all is answered.",
            fix="let threads that ask end before the connections are closed.",
        )
    )
