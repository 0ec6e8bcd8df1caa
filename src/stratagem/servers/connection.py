"""The side of a connection that asks: sends requests to servers, and waits for the answers."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Generator, Sequence
from typing import Any

from stratagem import environment
from stratagem.errors import UnavailableError
from stratagem.messages import explain
from stratagem.servers.closing import Closing
from stratagem.servers.keys import ClusterKeys, load_zmq
from stratagem.servers.wire import Message, pack, unpack

__all__ = ["Connections", "ServerError"]

_MS = 1000


class ServerError(RuntimeError):
    """A server could not do what it was asked to; the message has its own traceback."""


class Connections(Closing):
    """Connections to all servers of a cluster, for all threads of this process.

    Args:
        keys: of the cluster.
        addresses: of the servers, in their order.
    """

    def __init__(self, keys: ClusterKeys, addresses: Sequence[str]) -> None:
        self._keys = keys
        self._addresses = list(addresses)
        self._zmq: Any = load_zmq()
        self._context: Any = self._zmq.Context()
        self._context.linger = 0
        self._lock = threading.Lock()
        self._sockets: list[Any] = []
        # Sets of sockets, one to each server, that nobody uses now: one user at a time.
        self._free: list[list[Any]] = []
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        return len(self._addresses)

    def ask(self, server: int, message: Message, *, timeout_s: float | None = None) -> Message:
        """Asks one server.

        Args:
            server: its index.
            message: the question.
            timeout_s: how long to wait; None for `STRATAGEM_PEER_TIMEOUT_S`.

        Returns:
            The answer.

        Raises:
            UnavailableError: no answer in time. ServerError: the server raised an error.
        """
        return self.ask_all({server: message}, timeout_s=timeout_s)[server]

    def ask_all(
        self, messages: dict[int, Message], *, timeout_s: float | None = None
    ) -> dict[int, Message]:
        """Asks several servers at once.

        Args:
            messages: the question to each, by its index.
            timeout_s: how long to wait for all; None for `STRATAGEM_PEER_TIMEOUT_S`.

        Returns:
            The answers, by index of the server.

        Raises:
            UnavailableError: no answer in time. ServerError: a server raised an error.
        """
        limit_s = float(environment.read("peer_timeout_s")) if timeout_s is None else timeout_s
        deadline_s = time.monotonic() + limit_s
        number = next(self._numbers).to_bytes(8, "big")
        answers: dict[int, Message] = {}
        with self._borrowed() as sockets:
            for server, message in messages.items():
                sockets[server].send_multipart([number, *pack(message)], copy=False)
            for server in messages:  # the others' answers arrive meanwhile
                answers[server] = self._receive(
                    sockets[server], number, server, deadline_s, limit_s
                )
        for server, answer in answers.items():
            if answer.kind == "error":
                raise _server_error(server, self._addresses[server], answer)
        return answers

    def close(self) -> None:
        """Closes all sockets; nobody may be asking."""
        for socket in self._sockets:
            socket.close()
        self._context.term()

    @contextlib.contextmanager
    def _borrowed(self) -> Generator[list[Any]]:
        with self._lock:
            sockets = (
                self._free.pop() if self._free else [self._connect(a) for a in self._addresses]
            )
        try:
            yield sockets
        finally:
            with self._lock:
                self._free.append(sockets)

    def _connect(self, address: str) -> Any:
        socket = self._context.socket(self._zmq.DEALER)
        self._keys.unlock(socket)
        socket.connect(address)
        self._sockets.append(socket)
        return socket

    def _receive(
        self, socket: Any, number: bytes, server: int, deadline_s: float, limit_s: float
    ) -> Message:
        while True:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not socket.poll(max(1, int(left_s * _MS))):
                raise _no_answer(server, self._addresses[server], limit_s)
            got, *frames = socket.recv_multipart(copy=False)
            if got.bytes == number:  # else the late answer to a question that was given up
                return unpack([frame.buffer for frame in frames])


def _no_answer(server: int, address: str, limit_s: float) -> UnavailableError:
    return UnavailableError(
        explain(
            f"Parameter server {server} at {address} gave no answer for {limit_s:g} s.",
            expected="a server that runs, can be reached, and has the keys of this cluster.",
            fix="look at what it printed last; STRATAGEM_PEER_TIMEOUT_S changes the limit.",
        )
    )


def _server_error(server: int, address: str, answer: Message) -> ServerError:
    told = answer.fields
    return ServerError(
        explain(
            f"Parameter server {server} at {address} raised {told['type']}: {told['text']}",
            expected="a request that it can carry out.",
            fix=f"look at where it was raised:\n{told['trace']}",
        )
    )
