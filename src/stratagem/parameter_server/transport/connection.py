"""The side of a connection that asks: sends requests to servers, and waits for the answers."""

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
from stratagem.messages import explain
from stratagem.parameter_server.transport.keys import ClusterKeys, load_zmq
from stratagem.parameter_server.transport.server_connections import ConnectionSet, Peer, closed
from stratagem.parameter_server.transport.waiting import Question, wait
from stratagem.parameter_server.transport.wire import Message, pack

__all__ = ["Connections", "ServerError"]

# How long one that closes waits for the threads that it has told so.
_CLOSE_S = 5.0
# How often somebody is asked where a server is that is silent, by all threads.
_LOCATE_EVERY_S = 2.0


class ServerError(RuntimeError):
    """A server could not do what it was asked to; the message has its own traceback."""


class Connections(Closing):
    """Connections to all servers of a cluster, for all threads of this process.

    A request waits as long as its server works on it. Where the request or its answer was lost on
    the way, or the server was started again, it is sent again, with the same content.

    Args:
        keys: of the cluster.
        addresses: of the servers, in their order.
        locate: returns where a server is now, given its index, or None; called, every few seconds,
            while one is silent that is waited for.
        peers: what messages call a server.
        silence_s: how long one may give no sign of life; None for `STRATAGEM_PEER_TIMEOUT_S`.
    """

    def __init__(
        self,
        keys: ClusterKeys,
        addresses: Sequence[str],
        *,
        locate: Callable[[int], str | None] | None = None,
        peers: str = "Parameter server",
        silence_s: float | None = None,
    ) -> None:
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
        """Asks one server.

        Args:
            server: its index.
            message: the question.
            timeout_s: how long to wait; None for as long as the server works on it.

        Returns:
            The answer.

        Raises:
            UnavailableError: no answer in time, or no sign of life for too long. ServerError: the
                server raised an error.
        """
        return self.ask_all({server: message}, timeout_s=timeout_s)[server]

    def ask_all(
        self, messages: dict[int, Message], *, timeout_s: float | None = None
    ) -> dict[int, Message]:
        """Asks several servers at once.

        Args:
            messages: the question to each, by its index.
            timeout_s: how long to wait for all; None for as long as the servers work on it.

        Returns:
            The answers, by index of the server.

        Raises:
            UnavailableError: no answer in time, or no sign of life of one of the servers for too
                long. ServerError: a server raised an error.
        """
        silence_s = self._silence_s or float(environment.read("peer_timeout_s"))
        number = self._name + next(self._numbers).to_bytes(8, "big")
        packed = {server: pack(message) for server, message in messages.items()}
        questions: dict[int, Question] = {}
        with self._borrowed() as connections:
            try:
                for server, frames in packed.items():
                    self._peers[server].require_kept()
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
                # What was not sent yet is not sent later, when the caller has changed its arrays.
                for server, question in questions.items():
                    if question.answer is None:
                        connections.drop(server)
                raise
        return {server: self._answer(server, questions[server]) for server in messages}

    def move(self, server: int, address: str) -> None:
        """Says where a server is now; what waits for it is sent again, there.

        Args:
            server: its index.
            address: where it is.
        """
        self._peers[server].move(address)
        self._wake_all()

    def abandon(self, server: int, reason: str) -> None:
        """Gives a server up: whoever waits for it, or asks it before it is moved, gets an error.

        Args:
            server: its index.
            reason: why, for the message.
        """
        self._peers[server].abandon(reason)
        self._wake_all()

    def close(self) -> None:
        """Closes all sockets; threads that wait for an answer get an error."""
        with self._idle:
            self._is_closed = True
            for connections in self._busy:
                connections.end()
            is_idle = self._idle.wait_for(lambda: not self._busy, _CLOSE_S)
            for connections in self._free:
                connections.close()
            self._free.clear()
        if is_idle:  # else a thread is in `locate`; the sockets that it has are closed by it
            self._context.term()

    def begin_anew(self) -> None:
        """Leaves its sockets to the process that this one was forked from, and makes others."""
        _inherited.append((self._context, self._free, self._busy))
        self._begin()

    def _begin(self) -> None:
        self._context: Any = load_zmq().Context()
        self._name = uuid.uuid4().bytes  # with which no other client's numbers begin
        self._idle = threading.Condition()
        # One user at a time: sockets of ZeroMQ are for one thread.
        self._free: list[ConnectionSet] = []
        self._busy: set[ConnectionSet] = set()

    @contextlib.contextmanager
    def _borrowed(self) -> Generator[ConnectionSet]:
        with self._idle:
            if self._is_closed:
                raise closed()
            connections = (
                self._free.pop()
                if self._free
                else ConnectionSet(self._context, self._keys, self._peers)
            )
            self._busy.add(connections)
        try:
            yield connections
        finally:
            with self._idle:
                if connections in self._busy:  # else this process was forked meanwhile
                    self._busy.remove(connections)
                    if self._is_closed:
                        connections.close()
                    else:
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
        peer, told = self._peers[server], answer.fields
        raise ServerError(
            explain(
                f"{peer.name} at {peer.place.address} raised {told['type']}: {told['text']}",
                expected="a request that it can carry out.",
                fix=f"look at where it was raised:\n{told['trace']}",
            )
        )


_all_connections: weakref.WeakSet[Connections] = weakref.WeakSet()


# Of parents: closing them here would touch what is not there any more.
_inherited: list[Any] = []


def _begin_anew() -> None:
    """In a process that was forked, which has none of the threads that move messages."""
    for connections in list(_all_connections):
        connections.begin_anew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)
