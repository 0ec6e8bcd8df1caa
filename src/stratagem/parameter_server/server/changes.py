"""Deduplication of client requests that change server state.

Each client numbers its requests and has one outstanding at a time. After a lost answer it resends
the same number, possibly to a server that restarted from its journal. The change is made only once.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping
from typing import Any

from stratagem.parameter_server.transport.listener import Request
from stratagem.parameter_server.transport.wire import Message

__all__ = ["Change", "Changes"]

# Least recently active clients are dropped beyond this limit. Each worker thread is a client.
_MOST_CLIENTS = 4096

Outcome = Mapping[str, Any]


@dataclasses.dataclass
class _Client:
    """Last finished change of a client, and those in progress."""

    number: int = 0
    outcome: Outcome = dataclasses.field(default_factory=dict[str, Any])
    doing: dict[int, Change] = dataclasses.field(default_factory=dict[int, "Change"])


class Change:
    """A change request in progress. Resent copies of the request wait for the same answer."""

    def __init__(self, owner: Changes, request: Request) -> None:
        self.message = request.message
        self.requests = [request]
        self._owner = owner

    @property
    def client(self) -> str:
        """Client that sent the request."""
        return self.message.fields["client"]

    @property
    def number(self) -> int:
        """Number of the request among the client's changes."""
        return self.message.fields["number"]

    def done(self, **outcome: object) -> None:
        """Answers the request; `outcome` is also the answer to later resends.

        Call within `ServerVariables.changing`, so that a journal entry has both the change and its
        outcome, or neither.
        """
        try:
            answer = self._owner.finish(self, outcome)
            for request in self.requests:
                request.answer(answer)
        except Exception as error:  # noqa: BLE001 - sent to the client
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Answers with an error. Before `done`, a resent request is then carried out again."""
        self._owner.forget(self)
        for request in self.requests:
            request.fail(error)


class Changes:
    """Thread-safe record of each client's last change; `answer` builds a reply from an outcome."""

    def __init__(self, answer: Callable[[Message, Outcome], Message]) -> None:
        self._answer = answer
        self._lock = threading.Lock()
        self._clients: dict[str, _Client] = {}
        self.num_done = 0

    def begin(self, request: Request) -> Change | None:
        """Returns the change to carry out, or None for a resend, which gets the same answer."""
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
        """Records the outcome of a change, and returns the answer.

        Records first: the change is made, and must not be made again if there is no answer.
        """
        with self._lock:
            self._note(change.client, change.number, outcome)
        return self._answer(change.message, outcome)

    def forget(self, change: Change) -> None:
        """Removes a failed change."""
        with self._lock:
            client = self._clients.get(change.client)
            if client is not None:
                client.doing.pop(change.number, None)

    def done(self) -> list[list[Any]]:
        """Returns the client, number and outcome of each last change, for a journal."""
        with self._lock:
            return [
                [name, client.number, dict(client.outcome)]
                for name, client in self._clients.items()
                if client.number
            ]

    def restore(self, done: list[list[Any]]) -> None:
        """Restores the result of `done` from a journal."""
        with self._lock:
            for name, number, outcome in done:
                self._note(name, number, outcome)

    def _note(self, name: str, number: int, outcome: Outcome) -> None:
        client = self._clients.pop(name, None) or _Client()
        self._clients[name] = client  # most recent last
        client.doing.pop(number, None)
        self.num_done += 1
        if number > client.number:
            client.number, client.outcome = number, outcome
        if len(self._clients) > _MOST_CLIENTS:
            idle = (other for other, client in self._clients.items() if not client.doing)
            self._clients.pop(next(idle, name), None)
