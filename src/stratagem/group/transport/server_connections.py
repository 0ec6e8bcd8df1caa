"""Client-side server state and sockets."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from stratagem.errors import UnavailableError, explain
from stratagem.group.transport.keys import ClusterKeys, load_zmq
from stratagem.group.transport.local_sockets import LocalSocket
from stratagem.group.transport.shared_memory import (
    DEFAULT_LIMITS,
    ClientMemory,
    MemoryLimits,
    is_placed,
    large_bytes,
)
from stratagem.group.transport.wire import (
    HERE,
    MOST_FRAME_BYTES,
    PING,
    SHARE,
    SHARED,
    WHERE,
    in_parts,
    is_message,
    receive_parts,
    send_parts,
)

if TYPE_CHECKING:
    import zmq


_NO_NUMBER = bytes(8)
_LOST_MS = 5000


@dataclasses.dataclass(frozen=True)
class Place:
    """Addresses of a server.

    Args:
        address: TCP address.
        local: Unix socket, once announced by the server and reachable from here.
    """

    address: str
    local: LocalSocket | None = None


class Peer:
    """State of a server, shared by all threads. `name` is for messages."""

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self.place = Place(address)
        self.has_answered = False  # at its present address
        self.lost: str | None = None  # reason for the loss, or None
        self.num_losses = 0
        self._last_reason = ""
        self.located_s = float("-inf")  # time of the last `locate` call
        self._lock = threading.Lock()
        self._refused: set[LocalSocket] = set()

    def move(self, address: str) -> None:
        """Sets a new TCP address, and clears a loss."""
        with self._lock:
            if self.place.address != address:
                self.place = Place(address)
                self.has_answered = False
            self.lost = None

    def abandon(self, reason: str) -> None:
        """Marks the server as lost until it moves."""
        with self._lock:
            self.num_losses += 1
            self.lost = self._last_reason = reason

    def require_present(self, num_losses: int | None = None) -> None:
        """Raises UnavailableError if the server is lost.

        With `num_losses`, its value when the caller began to wait, a loss since then also counts.
        """
        reason = self.lost
        if num_losses is not None and num_losses != self.num_losses:  # it may have returned
            reason = self._last_reason
        if reason is not None:
            raise UnavailableError(
                explain(
                    f"{self.name} at {self.place.address} was lost: {reason}",
                    expected="a running process.",
                    fix="check its log for why it exited, and retry after it restarts.",
                    code="SG602",
                )
            )

    def note_local(self, address: str, local: LocalSocket) -> None:
        """Records the Unix socket that the server at a TCP address announced."""
        with self._lock:
            is_here = self.place.address == address and self.place.local != local
            if is_here and local not in self._refused and local.is_reachable():
                self.place = Place(address, local)

    def refuse_local(self, local: LocalSocket) -> None:
        """Falls back to TCP after a Unix socket stopped answering."""
        with self._lock:
            self._refused.add(local)
            if self.place.local == local:
                self.place = Place(self.place.address)


class ServerConnection:
    """A socket to one server, used by one thread at a time; `limits` are of shared memory."""

    def __init__(
        self,
        context: zmq.Context[Any],
        keys: ClusterKeys,
        peer: Peer,
        limits: MemoryLimits = DEFAULT_LIMITS,
    ) -> None:
        self.peer = peer
        self._limits = limits
        self._context = context
        self._keys = keys
        self._zmq = load_zmq()
        self.open()

    @property
    def is_at_best(self) -> bool:
        """True if it uses the server's current address and its fastest transport."""
        return self.place == self.peer.place and not self.socket.closed

    @property
    def is_astray(self) -> bool:
        """True if it leads to an old address of the server."""
        now = self.peer.place
        has_moved = self.place.address != now.address
        return has_moved or (self.place.local is not None and self.place.local != now.local)

    def open(self) -> None:
        """Connects to the server's current address. Raises zmq.ZMQError if it is invalid."""
        place = self.peer.place
        new = self._context.socket(self._zmq.DEALER)
        try:
            new.linger = 0
            new.sndhwm = new.rcvhwm = 0
            new.maxmsgsize = MOST_FRAME_BYTES  # the address may be a stranger's by now
            # A lost machine neither refuses nor acknowledges. Reconnect: it may be back.
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
        self._request_bytes = self._answer_bytes = 0  # largest so far

    def reopen(self) -> None:
        """Replaces the connection with one to the server's current address."""
        self.close()
        self.open()

    def close(self) -> None:
        """Closes the socket, dropping unsent frames, and the shared memory."""
        self.socket.close()
        for memory in (self._memory, self._offered):
            if memory is not None:
                memory.close()
        self._memory = self._offered = None

    def send(self, number: bytes, frames: Sequence[Any]) -> None:
        """Sends a request.

        `number` is unique over all clients. The frames' buffers must not change until the answer.
        """
        self._request_bytes = max(self._request_bytes, large_bytes(frames, self._limits.most_bytes))
        self._offer_memory()
        # The server replaces the old memory as soon as it receives an offer.
        if self._memory is not None and self._offered is None:
            frames = self._memory.placed(frames)
        self._send_parts([number, *in_parts(frames)])

    def ping(self, number: bytes, ping: bytes) -> None:
        """Asks if the server is working on a request; the answer echoes `ping`."""
        self._send_parts([number, PING, ping])

    def receive(self) -> tuple[bytes, list[Any]] | None:
        """Returns a request number and frames, or None for a message about the server itself."""
        number, *frames = receive_parts(self.socket)
        self._has_heard = self.peer.has_answered = True
        buffers = [frame.buffer for frame in frames]
        if self._memory is not None and is_placed(buffers):
            return number.bytes, self._memory.read(buffers)
        kind = None if is_message(buffers) else bytes(buffers[0])
        if kind is None:
            self._answer_bytes = max(
                self._answer_bytes, large_bytes(buffers, self._limits.most_bytes)
            )
        if kind not in (HERE, SHARED):
            return number.bytes, buffers
        details = [bytes(buffer) for buffer in buffers[1:]]
        if kind == SHARED:
            self._note_shared(is_shared=any(details))
        elif details:
            path, password = details
            self.peer.note_local(self.place.address, LocalSocket(path.decode(), password))
        return None

    def _send_parts(self, parts: list[Any]) -> None:
        # A rejected client has no connection and would block forever. An unsent request gets no
        # answer, so the waiting thread detects a lost server.
        with contextlib.suppress(self._zmq.Again):
            send_parts(self.socket, parts, int(self._zmq.NOBLOCK))

    def _offer_memory(self) -> None:
        """Shares memory with a server on this machine, if large arrays need it."""
        needed = self._request_bytes, self._answer_bytes
        if not self._may_share or self._offered is not None or not any(needed):
            return
        if self._memory is not None and self._memory.has_room(*needed):
            return
        try:
            self._offered = ClientMemory(*needed, self._limits)
        except OSError:  # an optimization only
            self._may_share = False
            return
        self._send_parts([_NO_NUMBER, SHARE, self._offered.offer])

    def _note_shared(self, *, is_shared: bool) -> None:
        """Uses or drops the offered memory, as the server answered."""
        former, new = self._memory, self._offered
        self._memory, self._offered = (new if is_shared else None), None
        self._may_share = is_shared
        for memory in (former, None if is_shared else new):  # the server dropped the former, too
            if memory is not None:
                memory.close()

    def leave_dead_socket(self) -> None:
        """Falls back to TCP if nothing listens on the Unix socket: the server is lost.

        Otherwise the server is busy. A restarted server announces a new Unix socket.
        """
        local = self.place.local
        if local is not None and not (self._has_heard and local.is_reachable()):
            self.peer.refuse_local(local)
