"""Optimizers that a client has sent, for servers that restart from their journals.

A journal only describes an optimizer: code from a file is never executed. A restarted server asks
for the optimizer with the first push.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
import uuid
from collections.abc import Callable, Collection, Generator, Mapping

from stratagem import environment
from stratagem.errors import UnavailableError
from stratagem.group.transport.connection import Connections
from stratagem.group.transport.wire import Message
from stratagem.messages import explain
from stratagem.parameter_server.client.shard_layout import ShardLayout

_POLL_S = 0.05


class SentRules:
    """Optimizers by name, as messages to the servers. Thread-safe."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._messages: dict[str, dict[int, Message]] = {}

    @contextlib.contextmanager
    def noted(self, optimizer: str, messages: Mapping[int, Message]) -> Generator[None]:
        """Records the messages that send an optimizer, by server, unless the `with` block fails.

        They are recorded before they are sent: a server that has answered may restart while others
        have not.
        """
        before = self._messages.get(optimizer)
        # Without the mode: the server restores it, and it may have changed meanwhile.
        self._messages[optimizer] = {
            server: dataclasses.replace(message, fields={**message.fields, "mode": None})
            for server, message in messages.items()
        }
        try:
            yield
        except BaseException:
            if before is None:
                self.forget(optimizer)
            else:
                self._messages[optimizer] = before
            raise

    def of(self, name: str) -> list[str]:
        """Returns the optimizers of a shard."""
        return [
            optimizer
            for optimizer, messages in self._messages.items()
            if any(name in message.fields["names"] for message in messages.values())
        ]

    def move(self, old: ShardLayout, new: ShardLayout) -> None:
        """Replaces the shards of a table by those of a new layout."""
        gone = {old.name_of(part) for part in range(len(old.servers))}
        for optimizer in self.of(old.name_of(0)):
            for server, message in self._messages[optimizer].items():
                names = [name for name in message.fields["names"] if name not in gone]
                names += [
                    new.name_of(part) for part, own in enumerate(new.servers) if own == server
                ]
                fields = {**message.fields, "names": names}
                self._messages[optimizer][server] = dataclasses.replace(message, fields=fields)

    def forget(self, optimizer: str) -> None:
        """Drops an optimizer."""
        self._messages.pop(optimizer, None)

    def send(self, server: int, optimizers: Collection[str] | None = None) -> set[str]:
        """Sends optimizers to one server, and returns the names of those that this client has.

        None sends all of them.
        """
        names: set[str] = set()
        for name, messages in list(self._messages.items()):
            if optimizers is not None and name not in optimizers:
                continue
            message = messages[server]
            # As another client: the push of this one that waits has an earlier number.
            fields = {**message.fields, "client": uuid.uuid4().hex, "number": 1}
            self._connections.ask(server, dataclasses.replace(message, fields=fields))
            names.add(name)
        return names

    def asked(
        self, messages: dict[int, Message], ask: Callable[[dict[int, Message]], dict[int, Message]]
    ) -> dict[int, Message]:
        """Sends pushes by `ask`, and again to restarted servers once these have the optimizers."""
        answers = ask(messages)
        needed = None
        while any(answer.kind == "needs_rule" for answer in answers.values()):
            needed = needed or NeededRules(self)
            answers |= ask({server: messages[server] for server in needed.supply(answers)})
        return answers


class NeededRules:
    """Wait of one push until servers have the optimizers that it needs.

    A worker usually has none of them: the coordinator sends them when it notices the restart.
    """

    def __init__(self, rules: SentRules) -> None:
        self._rules = rules
        self._limit_s = float(environment.read("peer_timeout_s"))
        self._deadline_s = time.monotonic() + self._limit_s

    def supply(self, answers: Mapping[int, Message]) -> list[int]:
        """Returns the servers that asked for optimizers, after sending or awaiting these.

        Raises:
            UnavailableError: no process has sent them within `STRATAGEM_PEER_TIMEOUT_S`.
        """
        lacking = [server for server, answer in answers.items() if answer.kind == "needs_rule"]
        for server in lacking:
            needed = answers[server].fields["optimizers"]
            if {*needed} <= self._rules.send(server, needed):
                continue
            if time.monotonic() > self._deadline_s:
                raise UnavailableError(
                    explain(
                        f"Parameter server {server} restarted from its journal and has waited "
                        f"{self._limit_s:g} s for the optimizers {sorted(needed)}.",
                        expected="the coordinator, or the worker that created an optimizer, to "
                        "send it again.",
                        fix="check that this process runs and reaches the server. Set "
                        "STRATAGEM_PEER_TIMEOUT_S to change the limit.",
                        code="SG602",
                    )
                )
            threading.Event().wait(_POLL_S)
        return lacking
