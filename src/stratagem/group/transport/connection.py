"""Client side of the transport: requests to servers, and their answers."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Generator, Sequence
from typing import Any

from stratagem import environment
from stratagem.closing import Closing
from stratagem.group.transport.connection_sets import ConnectionPool, ConnectionSet, closed
from stratagem.group.transport.keys import ClusterKeys
from stratagem.group.transport.server_connections import Peer
from stratagem.group.transport.shared_memory import DEFAULT_LIMITS, MemoryLimits
from stratagem.group.transport.waiting import Question, wait
from stratagem.group.transport.wire import Message, pack
from stratagem.messages import explain

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
        addresses: server addresses, by server index.
        locate: returns the current address of a server index, or None; called every few seconds
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
            silence_s = float(environment.read("peer_timeout_s"))
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
        """Returns True if a server has answered, and cannot be reached by a Unix socket."""
        peer = self._peers[server]
        return peer.has_answered and peer.place.local is None

    def move(self, server: int, address: str) -> None:
        """Sets a new server address; pending requests are resent there."""
        self._peers[server].move(address)
        self._wake_all()

    def abandon(self, server: int, reason: str) -> None:
        """Fails pending requests and, until `move`, new requests to a server, with this reason."""
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
        address = self._locate(server)
        if address is not None and address != peer.place.address:
            self.move(server, address)

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
