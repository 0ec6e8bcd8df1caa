"""`ServerRequests`: requests about whole servers, their updates and their tables."""

from __future__ import annotations

import itertools
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from stratagem.group.transport.connection import Connections
from stratagem.group.transport.wire import Message
from stratagem.parameter_server.client.known_layouts import KnownLayouts
from stratagem.parameter_server.client.sent_rules import SentRules
from stratagem.parameter_server.client.shard_layout import ShardLayout
from stratagem.parameter_server.server.versions import SeenVersions


class ServerRequests:
    """Requests to servers that name no variable, or only shards. Thread-safe.

    `known` has the layouts of variables.
    """

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._local = threading.local()
        self._numbers = itertools.count(1)
        self._seen = SeenVersions()
        self._rules = SentRules(connections)
        self.known = KnownLayouts()
        self.num_repeated = 0

    @property
    def num_servers(self) -> int:
        """Number of servers."""
        return len(self._connections)

    @property
    def losses(self) -> Mapping[str, int]:
        """Updates lost in server restarts, by server, run and kind; see `SeenVersions.losses`."""
        return self._seen.losses

    def ask_about_tables(
        self, kind: str, tables: Mapping[int, Mapping[str, Any]], **fields: object
    ) -> dict[int, Message]:
        """Sends a request about keyed tables, by server and name there, as a single change."""
        return self.ask_servers(
            kind,
            {
                server: ({**fields, "names": list(some), "tables": dict(some)}, [])
                for server, some in tables.items()
            },
        )

    def ask_servers(
        self, kind: str, requests: Mapping[int, tuple[Mapping[str, Any], Sequence[np.ndarray]]]
    ) -> dict[int, Message]:
        """Sends fields and arrays to each server, as a single change."""
        own = self._change()
        return self._connections.ask_all(
            {
                server: Message(kind, {**fields, **own}, arrays)
                for server, (fields, arrays) in requests.items()
            }
        )

    def expect(self, num_needed: int) -> None:
        """Sets the number of workers per synchronous update, after the loss or return of a worker.

        An update for which that many workers already wait is applied immediately.
        """
        self._ask_all("expect", num_needed=num_needed)

    def flush(self) -> None:
        """Applies gradients that wait for those of other workers, since no more will arrive."""
        self._ask_all("flush")

    def scalars(self, server: int = 0) -> dict[str, np.ndarray]:
        """Returns one server's copy of an optimizer's scalars."""
        answer = self._connections.ask(server, Message("scalars"))
        return dict(zip(answer.fields["names"], answer.arrays, strict=True))

    def set_scalar(self, name: str, value: np.ndarray) -> None:
        """Sets an optimizer scalar on all servers."""
        self._ask_all("set_scalar", [np.asarray(value)], name=name)

    def describe(self) -> dict[int, dict[str, Any]]:
        """Returns the state of each server, by index.

        Its fields are `version` (number of updates); `journaled_version` (updates on disk) and
        `journal_error`, None without a journal or error; `restored_version` (updates at start, or
        None); `names` of variables; `num_waiting` and `waiting` (number and names of workers that
        wait for others); `staleness`; `num_discarded`; `updates` (numbers of applied, resent and
        repeated ones, by kind); `num_dropped_records` (of a damaged end of the journal at start).
        """
        servers = range(len(self._connections))
        answers = self._ask(dict.fromkeys(servers, Message("describe")))
        return {server: answer.fields for server, answer in answers.items()}

    def staleness(self) -> dict[int, int]:
        """Returns the number of used pushes by staleness, summed over all servers.

        Staleness is the number of updates that a server made since the gradient's values were read.
        """
        counts: Counter[int] = Counter()
        for state in self.describe().values():
            counts.update(dict(state["staleness"]))
        return dict(sorted(counts.items()))

    def discarded(self) -> int:
        """Returns the number of discarded pushes, summed over all servers."""
        return sum(state["num_discarded"] for state in self.describe().values())

    def journal(
        self, servers: Collection[int] | None = None, *, is_needed: bool = True
    ) -> dict[int, int]:
        """Makes servers, None for all, write their journals.

        Without `is_needed`, they may have none. Returns the number of updates on each disk.
        """
        servers = range(self.num_servers) if servers is None else servers
        message = Message("journal", {"is_needed": is_needed})
        answers = self._connections.ask_all(dict.fromkeys(servers, message))
        return {server: answer.fields["journaled_version"] for server, answer in answers.items()}

    def optimizers_of(self, layout: ShardLayout) -> list[str]:
        """Returns the optimizers of a variable that this client has sent."""
        return self._rules.of(layout.name_of(0))

    def placed_layouts(self) -> dict[str, Any]:
        """Returns the layouts of tables that were moved, by name, as the first server has them."""
        return self._connections.ask(0, Message("describe")).fields["layouts"]

    def _ask(
        self,
        messages: dict[int, Message],
        variables: Callable[[int], Sequence[str]] = lambda server: (),
    ) -> dict[int, Message]:
        """Sends requests, and records the versions of the variables in the answers."""
        answers = self._connections.ask_all(messages)
        for server, answer in answers.items():
            has_values = answer.kind != "needs_rule"
            self._seen.note(server, answer, variables(server) if has_values else ())
            self._note_lifetime(server, answer.fields["lifetime"])
            self.num_repeated += bool(answer.fields.get("is_repeated"))
        return answers

    def _ask_all(self, kind: str, arrays: Sequence[np.ndarray] = (), **fields: object) -> None:
        message = Message(kind, {**fields, **self._change()}, arrays)
        self._ask(dict.fromkeys(range(len(self._connections)), message))

    def _note_lifetime(self, server: int, lifetime: int) -> None:
        """Handles the number of a server's run, which an answer has."""

    def _change(self) -> dict[str, Any]:
        """Returns fields that identify a change, so that servers apply a resent one only once.

        Each thread is a separate client with one change at a time.
        """
        client = getattr(self._local, "client", None)
        if client is None:
            client = self._local.client = uuid.uuid4().hex
        return {"client": client, "number": next(self._numbers)}
