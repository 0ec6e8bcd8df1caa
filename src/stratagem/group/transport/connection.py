"""Client side of the transport: requests to servers, and their answers."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import socket
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any

from stratagem import settings
from stratagem.errors import UnavailableError, explain
from stratagem.group.transport.endpoints import ClusterKeys, Place, is_reachable, load_zmq
from stratagem.group.transport.shared_memory import (
    DEFAULT_LIMITS,
    ClientMemory,
    MemoryLimits,
    is_placed,
    large_bytes,
)
from stratagem.group.transport.wire import (
    MOST_FRAME_BYTES,
    PING,
    SHARE,
    SHARED,
    UNKNOWN,
    Message,
    in_parts,
    is_message,
    pack,
    receive_parts,
    send_parts,
    unpack,
)
from stratagem.resources import Closing

if TYPE_CHECKING:
    import zmq

# Servers, and the sockets to them.

_NO_NUMBER = bytes(8)
_LOST_MS = 5000


class Peer:
    """State of a server, shared by all threads. `name` is for messages."""

    def __init__(self, name: str, addresses: str) -> None:
        self.name = name
        self.addresses = addresses
        self.place = Place.of(addresses)
        self.lost: str | Exception | None = None  # reason for the loss, or None
        self.num_losses = 0
        self._last_reason: str | Exception = ""
        self.located_s = float("-inf")  # time of the last `locate` call
        self._lock = threading.Lock()

    def move(self, addresses: str) -> None:
        """Sets new addresses, and clears a loss."""
        with self._lock:
            if addresses != self.addresses:
                self.addresses, self.place = addresses, Place.of(addresses)
            self.lost = None

    def abandon(self, reason: str | Exception) -> None:
        """Marks the server as lost until it moves; an exception gives the whole message."""
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
        if isinstance(reason, Exception):  # not itself: several threads may raise it at once
            raise UnavailableError(str(reason)) from reason
        if reason is not None:
            raise UnavailableError(
                explain(
                    f"{self.name} at {self.place.address} was lost: {reason}",
                    expected="a running process.",
                    fix="check its log for why it exited, and retry after it restarts.",
                    code="SG602",
                )
            )

    def leave_local(self, local: str) -> None:
        """Falls back to TCP after a Unix socket stopped answering."""
        with self._lock:
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
    def is_astray(self) -> bool:
        """True if it leads to an old address of the server."""
        return self.place != self.peer.place

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
            if place.local is None:
                self._keys.unlock(new)
            new.connect(place.local or place.address)
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
        self._has_heard = True
        buffers = [frame.buffer for frame in frames]
        if self._memory is not None and is_placed(buffers):
            return number.bytes, self._memory.read(buffers)
        kind = None if is_message(buffers) else bytes(buffers[0])
        if kind is None:
            self._answer_bytes = max(
                self._answer_bytes, large_bytes(buffers, self._limits.most_bytes)
            )
        if kind != SHARED:
            return number.bytes, buffers
        self._note_shared(is_shared=any(bytes(buffer) for buffer in buffers[1:]))
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
        """Falls back to TCP if nothing listens on the Unix socket; otherwise the server is busy."""
        local = self.place.local
        if local is not None and not (self._has_heard and is_reachable(local)):
            self.peer.leave_local(local)


# Connections to all servers of a cluster, shared by threads.

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
        """Returns a connection to a server at its current address."""
        connection = self._connections.get(server)
        if connection is None:
            connection = self._connections[server] = self._pool.take(server)
        if connection.is_astray or connection.socket.closed:
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


# Waiting for answers from several servers, each of which may be slow, lost, or moved.

_MS = 1000
# Silence before a ping, and then between pings.
_SILENCE_S = 1.0
_pings = itertools.count(1)


class Question:
    """A request sent to one server, until it is answered.

    Args:
        connection: connection to the server.
        number: number of the request.
        frames: the packed request.
        locate: called while the server is silent, because it may have moved.
        silence_s: seconds without a sign of life before the server counts as lost.
        limit_s: total time limit in seconds, even while the server works; None for no limit.
    """

    def __init__(
        self,
        connection: ServerConnection,
        number: bytes,
        frames: Sequence[Any],
        *,
        locate: Callable[[], None],
        silence_s: float,
        limit_s: float | None,
    ) -> None:
        self.connection = connection
        self.answer: Message | None = None
        self._number = number
        self._frames = frames
        self._locate = locate
        self._silence_s = silence_s
        self._interval_s = min(_SILENCE_S, silence_s / 4)
        self._limit_s = float("inf") if limit_s is None else limit_s
        self._deadline_s = time.monotonic() + self._limit_s
        self._num_losses = connection.peer.num_losses
        self._note_heard()
        self._send()

    @property
    def due_s(self) -> float:
        """Time of the next `look_after` call if nothing arrives before."""
        return min(self._next_s, self._deadline_s, self._heard_s + self._silence_s)

    def receive(self) -> None:
        """Processes an arrived message."""
        received = self.connection.receive()
        self._note_heard()
        if received is None or received[0] != self._number:  # a late or repeated answer
            return
        _, frames = received
        if is_message(frames):
            self.answer = unpack(frames)
        elif bytes(frames[0]) == UNKNOWN and int.from_bytes(frames[1], "big") > self._sent_before:
            # Answers to older pings predate the last send, and say nothing about it.
            self._send()

    def look_after(self, now_s: float) -> None:
        """Follows a moved server, pings a silent one, and gives up on a lost one.

        Raises:
            UnavailableError: the server is lost, or a time limit has passed.
        """
        self.connection.peer.require_present(self._num_losses)
        if self.connection.is_astray:
            self._follow()
        elif now_s >= self._deadline_s:
            raise self._no_answer(self._limit_s)
        elif now_s >= self._heard_s + self._silence_s:
            raise self._no_answer(self._silence_s)
        elif now_s >= self._next_s:
            self._look_for_it(now_s)

    def _look_for_it(self, now_s: float) -> None:
        if self._is_pinged:
            self._locate()
            self.connection.leave_dead_socket()
        if self.connection.is_astray:
            self._follow()
            return
        self.connection.ping(self._number, next(_pings).to_bytes(8, "big"))
        self._is_pinged = True
        self._next_s = now_s + self._interval_s

    def _follow(self) -> None:
        self.connection.reopen()
        self._note_heard()  # restart the silence limit for the new address
        self._send()

    def _send(self) -> None:
        self._sent_before = next(_pings)
        self.connection.send(self._number, self._frames)

    def _note_heard(self) -> None:
        self._heard_s = time.monotonic()
        self._next_s = self._heard_s + self._interval_s
        self._is_pinged = False

    def _no_answer(self, limit_s: float) -> UnavailableError:
        peer = self.connection.peer
        return UnavailableError(
            explain(
                f"{peer.name} at {peer.place.address} gave no answer for {limit_s:g} s.",
                expected="a running, reachable process with the keys of this cluster.",
                fix="check the last lines of its log. To change the limit, set "
                "STRATAGEM_PEER_TIMEOUT_S or sg.coordinator.options(recovery_timeout_s=), unless "
                "the call sets its own limit.",
                code="SG602",
            )
        )


def wait(questions: Sequence[Question], connections: ConnectionSet) -> None:
    """Waits until all questions, each to a different server, are answered.

    Raises:
        UnavailableError: a server was lost, or the connections were closed.
    """
    zmq = load_zmq()
    pending = list(questions)
    while pending:
        connections.require_open()
        now_s = time.monotonic()
        for question in pending:
            question.look_after(now_s)
        left_s = min(question.due_s for question in pending) - now_s
        sockets = [(question.connection.socket, zmq.POLLIN) for question in pending]
        # Wait at least 1 ms to avoid a busy loop.
        woken = connections.woken.fileno()  # readable after `wake`
        ready = dict(zmq.zmq_poll([*sockets, (woken, zmq.POLLIN)], max(1, math.ceil(left_s * _MS))))
        if woken in ready:
            connections.note_woken()
        for question in pending:
            if question.connection.socket in ready:
                question.receive()
        pending = [question for question in pending if question.answer is None]


# How long `close` waits for other threads to stop using their sockets.
_CLOSE_S = 5.0
# Minimum interval between `locate` calls for one server, over all threads.
_LOCATE_EVERY_S = 2.0


class ServerError(RuntimeError):
    """An error raised by a server; the message includes the server's traceback."""


class Connections(Closing):
    """Thread-safe connections to all servers of a cluster.

    A request waits for as long as its server works on it. The same request is resent if it or its
    answer was lost, or if the server restarted.

    Args:
        keys: keys of the cluster.
        addresses: `Listener.addresses` of each server.
        locate: returns the current addresses of a server index, or None; called every few seconds
            while a server that owes an answer is silent.
        peers: name of a server in messages.
        silence_s: seconds without a sign of life before a server counts as lost; None for
            `STRATAGEM_PEER_TIMEOUT_S`.
        memory_limits: limits of the memory shared with a server on this machine, per connection.
    """

    def __init__(
        self,
        keys: ClusterKeys,
        addresses: Sequence[str],
        *,
        locate: Callable[[int], str | None] | None = None,
        peers: str = "Parameter server",
        silence_s: float | None = None,
        memory_limits: MemoryLimits = DEFAULT_LIMITS,
    ) -> None:
        self._memory_limits = memory_limits
        self._keys = keys
        self._peers = [Peer(f"{peers} {i}", address) for i, address in enumerate(addresses)]
        self._locate = locate
        self._silence_s = silence_s
        self._numbers = itertools.count(1)
        self._is_closed = False
        self._begin()
        _all_connections.add(self)

    def __len__(self) -> int:
        return len(self._peers)

    def ask(self, server: int, message: Message, *, timeout_s: float | None = None) -> Message:
        """Sends a request to one server; see `ask_all`."""
        return self.ask_all({server: message}, timeout_s=timeout_s)[server]

    def ask_all(
        self, messages: dict[int, Message], *, timeout_s: float | None = None
    ) -> dict[int, Message]:
        """Sends requests to several servers at once, and returns their answers by server index.

        `timeout_s` limits the total wait, in seconds; None waits while the servers work.

        Raises:
            UnavailableError: no answer in time, or a server was silent for too long.
            ServerError: a server raised an error.
        """
        silence_s = self._silence_s
        if silence_s is None:
            silence_s = float(settings.read("peer_timeout_s"))
        number = self._name + next(self._numbers).to_bytes(8, "big")
        packed = {server: pack(message) for server, message in messages.items()}
        questions: dict[int, Question] = {}
        with self._borrowed() as connections:
            try:
                for server, frames in packed.items():
                    self._peers[server].require_present()
                    questions[server] = Question(
                        connections.to(server),
                        number,
                        frames,
                        locate=functools.partial(self._look_for, server),
                        silence_s=silence_s,
                        limit_s=timeout_s,
                    )
                wait(list(questions.values()), connections)
            except BaseException:
                # Drop unsent frames: the caller may change its arrays after this error.
                for server, question in questions.items():
                    if question.answer is None:
                        connections.drop(server)
                raise
        return {server: self._answer(server, questions[server]) for server in messages}

    def is_far(self, server: int) -> bool:
        """Returns True if a server cannot be reached by a Unix socket."""
        return self._peers[server].place.local is None

    def move(self, server: int, addresses: str) -> None:
        """Sets new addresses of a server; pending requests are resent there."""
        self._peers[server].move(addresses)
        self._wake_all()

    def abandon(self, server: int, reason: str | Exception) -> None:
        """Fails pending requests and, until `move`, new requests to a server, with this reason.

        An exception is the cause of the error and gives its message.
        """
        self._peers[server].abandon(reason)
        self._wake_all()

    def close(self) -> None:
        """Closes all sockets; threads waiting for an answer get an error."""
        with self._idle:
            self._is_closed = True
            for connections in self._busy:
                connections.end()
            is_idle = self._idle.wait_for(lambda: not self._busy, _CLOSE_S)
            for connections in self._free:
                connections.close()
            self._free.clear()
            self._pool.close()
        if is_idle:  # else a thread is in `locate`, and closes its own sockets later
            self._pool.end()

    def begin_anew(self) -> None:
        """Creates new sockets in a forked process; the old ones belong to the parent."""
        _inherited.append((self._pool, self._free, self._busy))
        self._begin()

    def _begin(self) -> None:
        self._name = uuid.uuid4().bytes  # unique prefix of this client's request numbers
        self._idle = threading.Condition()
        # Each connection and each set is used by one thread at a time: ZeroMQ sockets are not
        # thread-safe.
        self._pool = ConnectionPool(self._keys, self._peers, self._memory_limits)
        self._free: list[ConnectionSet] = []
        self._busy: set[ConnectionSet] = set()

    @contextlib.contextmanager
    def _borrowed(self) -> Generator[ConnectionSet]:
        with self._idle:
            if self._is_closed:
                raise closed()
            connections = self._free.pop() if self._free else ConnectionSet(self._pool)
            self._busy.add(connections)
        try:
            yield connections
        finally:
            with self._idle:
                if connections in self._busy:  # else this process was forked in between
                    self._busy.remove(connections)
                    if self._is_closed:
                        connections.close()
                    else:
                        connections.release()
                        self._free.append(connections)
                    self._idle.notify_all()

    def _wake_all(self) -> None:
        with self._idle:
            for connections in self._busy:
                connections.wake()

    def _look_for(self, server: int) -> None:
        peer, now_s = self._peers[server], time.monotonic()
        if self._locate is None or now_s < peer.located_s + _LOCATE_EVERY_S:
            return
        peer.located_s = now_s
        addresses = self._locate(server)
        if addresses is not None and addresses != peer.addresses:
            self.move(server, addresses)

    def _answer(self, server: int, question: Question) -> Message:
        answer = question.answer
        assert answer is not None
        if answer.kind != "error":
            return answer
        peer, fields = self._peers[server], answer.fields
        raise ServerError(
            explain(
                f"{peer.name} at {peer.place.address} raised {fields['type']}: {fields['text']}",
                expected="a request that the server can carry out.",
                fix=f"see the traceback from the server:\n{fields['trace']}",
            )
        )


_all_connections: weakref.WeakSet[Connections] = weakref.WeakSet()


# Sockets of parent processes, never closed: their I/O threads do not exist in a fork.
_inherited: list[Any] = []


def _begin_anew() -> None:
    """Resets connections after a fork, because ZeroMQ's I/O threads exist only in the parent."""
    for connections in list(_all_connections):
        connections.begin_anew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)
