"""Waiting for the answers of several servers, each of which may be slow, lost, or elsewhere."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from stratagem.errors import UnavailableError
from stratagem.messages import explain
from stratagem.parameter_server.transport.keys import load_zmq
from stratagem.parameter_server.transport.server_connections import ConnectionSet, ServerConnection
from stratagem.parameter_server.transport.wire import UNKNOWN, Message, is_message, unpack

__all__ = ["Question", "wait"]

_MS = 1000
# How long a server may be silent before it is asked whether it is there, and then each time.
_SILENCE_S = 1.0
_pings = itertools.count(1)


class Question:
    """A request to one server, sent, until it is answered.

    Args:
        connection: to the server.
        number: of the request.
        frames: the request.
        locate: tells that the server is silent, and so may be elsewhere.
        silence_s: how long a server may give no sign of life.
        limit_s: after what time it is given up even if the server works on it; None for never.
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
        """When it is to be looked after, if nothing comes before."""
        return min(self._next_s, self._deadline_s, self._heard_s + self._silence_s)

    def receive(self) -> None:
        """Takes what has arrived."""
        received = self.connection.receive()
        self._note_heard()
        if received is None or received[0] != self._number:  # what was given up, or sent twice
            return
        _, frames = received
        if is_message(frames):
            self.answer = unpack(frames)
        elif bytes(frames[0]) == UNKNOWN and int.from_bytes(frames[1], "big") > self._sent_before:
            # Pings of before the request was last sent were of the one before it.
            self._send()

    def look_after(self, now_s: float) -> None:
        """Follows a server that has moved, asks one that is silent, and gives up one that is lost.

        Args:
            now_s: the time.

        Raises:
            UnavailableError: it was given up.
        """
        self.connection.peer.require_kept(self._num_losses)
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
        self._note_heard()  # nobody has been silent there yet
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
                expected="a process that runs, can be reached, and has the keys of this cluster.",
                fix="look at what it printed last; STRATAGEM_PEER_TIMEOUT_S changes the limit, or "
                "sg.coordinator.options(recovery_timeout_s=), unless the call has one of its own.",
            )
        )


def wait(questions: Sequence[Question], connections: ConnectionSet) -> None:
    """Waits until all questions are answered.

    Args:
        questions: to different servers, over connections of the set.
        connections: the set; other threads wake it when they know more.

    Raises:
        UnavailableError: a server was lost, or the set was ended.
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
        # At least 1 ms: what is due in less is not looked for again and again.
        woken = connections.woken.fileno()  # becomes readable when there is news
        ready = dict(zmq.zmq_poll([*sockets, (woken, zmq.POLLIN)], max(1, math.ceil(left_s * _MS))))
        if woken in ready:
            connections.note_woken()
        for question in pending:
            if question.connection.socket in ready:
                question.receive()
        pending = [question for question in pending if question.answer is None]
