"""Waiting for answers from several servers, each of which may be slow, lost, or moved."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from stratagem.errors import UnavailableError
from stratagem.group.transport.connection_sets import ConnectionSet
from stratagem.group.transport.keys import load_zmq
from stratagem.group.transport.server_connections import ServerConnection
from stratagem.group.transport.wire import UNKNOWN, Message, is_message, unpack
from stratagem.messages import explain

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
