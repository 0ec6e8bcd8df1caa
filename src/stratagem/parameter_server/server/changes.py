"""Requests that change something, each carried out at most once.

A client has one such request at a time, and numbers them. If an answer is lost it asks again with
the same number, maybe after the server was started again from its journal.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping
from typing import Any

from stratagem.parameter_server.transport.listener import Request
from stratagem.parameter_server.transport.wire import Message

__all__ = ["Change", "Changes"]

# Clients that have asked least recently are forgotten. A thread of a worker is a client.
_MOST_CLIENTS = 4096

Outcome = Mapping[str, Any]


@dataclasses.dataclass
class _Client:
    """The last change of a client, and those that are under way."""

    number: int = 0
    outcome: Outcome = dataclasses.field(default_factory=dict[str, Any])
    doing: dict[int, Change] = dataclasses.field(default_factory=dict[int, "Change"])


class Change:
    """A request to be carried out.

    Args:
        owner: who is told when it is done.
        request: the request.
    """

    def __init__(self, owner: Changes, request: Request) -> None:
        self.message = request.message
        self.requests = [request]
        self._owner = owner

    @property
    def client(self) -> str:
        """The client that sent it."""
        return self.message.fields["client"]

    @property
    def number(self) -> int:
        """Its number among the client's changes."""
        return self.message.fields["number"]

    def done(self, **outcome: Any) -> None:
        """Answers. Nothing else may change meanwhile, so that a journal has both or neither.

        Args:
            outcome: fields of the answer, now and if the client asks again.
        """
        try:
            answer = self._owner.finish(self, outcome)
        except Exception as error:  # noqa: BLE001 - told to who has asked
            self.fail(error)
            return
        for request in self.requests:
            request.answer(answer)

    def fail(self, error: BaseException) -> None:
        """Answers with an error; who asks again tries again.

        Args:
            error: what went wrong.
        """
        self._owner.forget(self)
        for request in self.requests:
            request.fail(error)


class Changes:
    """Knows what the last change of each client has come to. Any thread may call it.

    Args:
        answer: makes the answer of a request and what it has come to.
    """

    def __init__(self, answer: Callable[[Message, Outcome], Message]) -> None:
        self._answer = answer
        self._lock = threading.Lock()
        self._clients: dict[str, _Client] = {}
        self.num_done = 0

    def begin(self, request: Request) -> Change | None:
        """Returns what is to be carried out; None if it was, or is now, and will be answered.

        Args:
            request: with fields `client` and `number`.
        """
        change = Change(self, request)
        with self._lock:
            client = self._clients.setdefault(change.client, _Client())
            first = client.doing.get(change.number)
            if first is not None:
                first.requests.append(request)
                return None
            if change.number > client.number:
                client.doing[change.number] = change
                return change
            outcome = client.outcome
        request.answer(self._answer(request.message, outcome))
        return None

    def finish(self, change: Change, outcome: Outcome) -> Message:
        """Notes what a change has come to.

        Args:
            change: what `begin` returned.
            outcome: fields of the answer.

        Returns:
            The answer.
        """
        with self._lock:
            self._note(change.client, change.number, outcome)
        return self._answer(change.message, outcome)

    def forget(self, change: Change) -> None:
        """Notes that a change has come to nothing.

        Args:
            change: what `begin` returned.
        """
        with self._lock:
            client = self._clients.get(change.client)
            if client is not None:
                client.doing.pop(change.number, None)

    def done(self) -> list[list[Any]]:
        """Returns the client, the number and the outcome of all last changes, for a journal."""
        with self._lock:
            return [
                [name, client.number, dict(client.outcome)]
                for name, client in self._clients.items()
                if client.number
            ]

    def restore(self, done: list[list[Any]]) -> None:
        """Takes from a journal what `done` returned.

        Args:
            done: what it returned.
        """
        with self._lock:
            for name, number, outcome in done:
                self._note(name, number, outcome)

    def _note(self, name: str, number: int, outcome: Outcome) -> None:
        client = self._clients.pop(name, None) or _Client()
        self._clients[name] = client  # as the last of all
        client.doing.pop(number, None)
        self.num_done += 1
        if number > client.number:
            client.number, client.outcome = number, outcome
        if len(self._clients) > _MOST_CLIENTS:
            idle = (other for other, client in self._clients.items() if not client.doing)
            self._clients.pop(next(idle, name), None)
