"""`ServerClient`: reads and writes variables by name, on any number of servers."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import numpy as np

from stratagem.group.transport.connection import Connections
from stratagem.group.transport.wire import Message
from stratagem.optional_libraries import load
from stratagem.parameter_server.client.distinct_rows import DistinctIds, DistinctKeys
from stratagem.parameter_server.client.key_layout import KeyLayout
from stratagem.parameter_server.client.known_layouts import by_layouts
from stratagem.parameter_server.client.request_partitioning import (
    GradientParts,
    RequestParts,
    WholeVariables,
    creation_messages,
    shard_name,
)
from stratagem.parameter_server.client.row_cache import RowCache
from stratagem.parameter_server.client.row_reads import RowReads, RowRequest
from stratagem.parameter_server.client.running_function import RunningFunction
from stratagem.parameter_server.client.server_requests import ServerRequests
from stratagem.parameter_server.client.shard_layout import ShardLayout
from stratagem.parameter_server.server.updates import ASYNCHRONOUS, Pushed, UpdateMode, UpdateRule


class ServerClient(ServerRequests):
    """Reads and writes variables by name, wherever their shards are. Thread-safe.

    `client_name` identifies this worker to synchronous updates, also after a restart. With None
    each thread counts as a worker. `row_cache` None caches no rows.
    """

    def __init__(
        self,
        connections: Connections,
        client_name: str | None = None,
        row_cache: RowCache | None = None,
    ) -> None:
        super().__init__(connections)
        self._client_name = client_name
        self._distinct = DistinctIds()
        self.rows = RowReads(self._ask, self._seen, row_cache, self._distinct)
        self._pickle: Any = load(
            "cloudpickle", needed_by="a client of parameter servers", install="stratagem[ray]"
        )

    @contextlib.contextmanager
    def in_function(self, function: RunningFunction | None) -> Generator[None]:
        """Identifies the updates of this thread by a scheduled function, in a `with` block.

        None is for updates that belong to no function.
        """
        previous = getattr(self._local, "function", None)
        self._local.function = function
        try:
            yield
        finally:
            self._local.function = previous

    def know(self, placement: ShardLayout) -> None:
        """Registers the layout of a variable that another process created."""
        if self.known.add(placement):
            self.rows.drop_cached()

    def switch(self, layout: KeyLayout) -> None:
        """Uses a new layout of a table, also in messages that send its optimizer again."""
        self._rules.move(self.known[layout.name], layout)
        self.know(layout)

    def placement_of(self, name: str) -> ShardLayout:
        """Returns the layout of a variable, or of the variable that a slot belongs to.

        Raises a KeyError if the variable is not registered here.
        """
        return self.known.find(name)[0]

    @property
    def layouts(self) -> list[ShardLayout]:
        """Layouts of the variables that were created or registered here."""
        return self.known.all

    def create(
        self, placement: ShardLayout, initial: np.ndarray | Callable[[int, int], np.ndarray] | None
    ) -> bool:
        """Creates a variable and returns True, unless the servers have it: they outlive clients.

        `initial` is its value, or a function of the first row and the number of rows. Servers call
        the function, for values too large for one process. A table of keys has None.

        Raises:
            ValueError: the servers have a different variable of that name.
        """
        self.know(placement)
        messages = creation_messages(placement, initial, self._pickle.dumps, **self._change())
        answers = self._ask(messages)
        return any(answer.fields["is_new"] for answer in answers.values())

    @by_layouts
    def pull(self, names: Sequence[str]) -> dict[str, np.ndarray]:
        """Returns whole variables, or slots as "name:slot". The arrays must not be modified."""
        wanted = self._wanted(names)
        messages = {
            server: Message("pull", {"names": wanted.names(server)}) for server in wanted.servers
        }
        answers = self._ask(messages, wanted.variables)
        return wanted.joined({server: answer.arrays for server, answer in answers.items()})

    def pull_rows(self, name: str, ids: np.ndarray, *, may_be_cached: bool = False) -> np.ndarray:
        """Returns rows of a variable or slot; a repeated row is sent once.

        `ids` may have any shape; the result has shape (*ids.shape, ...), and must not be modified.
        `may_be_cached` allows rows from this process's `RowCache`, if it has one.

        Raises:
            IndexError: an id is out of range.
        """
        return self.pull_rows_of([(name, ids)], may_be_cached=may_be_cached)[0]

    @by_layouts
    def pull_rows_of(
        self,
        wanted: Sequence[tuple[str, np.ndarray | DistinctKeys]],
        *,
        may_be_cached: bool = False,
    ) -> list[np.ndarray]:
        """Returns rows of several variables or slots, which may repeat; see `pull_rows`.

        All of them are requested with one message to each server, unless answers are large.
        """
        requests = [
            RowRequest(
                *self.known.find(name),
                np.asarray(ids),
                ids if isinstance(ids, DistinctKeys) else None,
            )
            for name, ids in wanted
        ]
        return self.rows.pull(requests, may_be_cached=may_be_cached)

    @by_layouts
    def assign(self, name: str, value: np.ndarray, *, sign: int = 0) -> None:
        """Writes a whole variable or slot: `sign` 0 sets it, 1 adds the value, -1 subtracts it."""
        placement, slot = self.known.find(name)
        parts = RequestParts()
        for shard, part in enumerate(placement.parts(np.asarray(value))):
            parts.add(placement.servers[shard], shard_name(placement, shard) + slot, part)
        with self.rows.writing(placement.name):
            self._ask(parts.messages("assign", sign=sign, **self._update()))

    @by_layouts
    def scatter(self, name: str, ids: np.ndarray, values: np.ndarray, *, sign: int = 0) -> None:
        """Writes rows of a variable or slot: `sign` 0 sets them, 1 adds, -1 subtracts `values`.

        `ids` has shape (k,) and `values` (k, ...). Repeated rows are added up; with `sign` 0 the
        last one is set.

        Raises:
            IndexError: an id is out of range.
        """
        placement, slot = self.known.find(name)
        written = self._distinct.of(placement, np.asarray(ids))
        values = np.asarray(values)
        values = written.summed(values) if sign else written.last(values)
        parts = RequestParts()
        for shard, part, numbers in written.held(placement):
            if len(numbers):
                full_name = shard_name(placement, shard) + slot
                parts.add(placement.servers[shard], full_name, numbers, values[part])
        with self.rows.writing(placement.name):
            self._ask(parts.messages("scatter", sign=sign, **self._update()))

    @by_layouts
    def set_rule(
        self,
        rule: UpdateRule,
        names: Sequence[str],
        mode: UpdateMode | None = ASYNCHRONOUS,
        optimizer: str = "",
    ) -> None:
        """Sends the optimizer of the variables `names` to all servers.

        `mode` applies to all optimizers, and a later call may change it; None keeps it. `optimizer`
        is a name without a dot, the prefix of the optimizer's state.
        """
        pickled = np.frombuffer(self._pickle.dumps(rule), np.uint8)
        shards: dict[int, list[str]] = {server: [] for server in range(len(self._connections))}
        for name in names:
            placement = self.known[name]
            for shard, server in enumerate(placement.servers):
                shards[server].append(shard_name(placement, shard))
        own_mode = None if mode is None else dataclasses.asdict(mode)
        fields = {"mode": own_mode, "optimizer": optimizer, **self._change()}
        messages = {
            server: Message("rule", {**fields, "names": held}, [pickled])
            for server, held in shards.items()
        }
        with self._rules.noted(optimizer, messages):
            self._ask(messages)

    def drop_rule(self, optimizer: str) -> None:
        """Deletes an optimizer and its state on all servers."""
        self._rules.forget(optimizer)
        self._ask_all("drop_rule", optimizer=optimizer)

    def send_rules_again(self, server: int) -> None:
        """Sends all optimizers to a restarted server, whose journal only describes them."""
        self._rules.send(server)

    @by_layouts
    def push(
        self,
        whole: Mapping[str, np.ndarray],
        rows: Mapping[str, tuple[np.ndarray | DistinctKeys, np.ndarray]] | None = None,
        *,
        pull: Sequence[str] = (),
        optimizers: Mapping[str, str] | None = None,
        scalars: Mapping[str, float] | None = None,
        assigned: Mapping[str, tuple[np.ndarray, int]] | None = None,
    ) -> Pushed:
        """Sends gradients; returns once the servers have applied or discarded them.

        Each server with some of these variables counts one update. For synchronous updates all
        workers must push gradients of the same variables. As with TensorFlow's accumulators, each
        server decides on its own which workers are late: with backup workers, a push may be used on
        only some servers.

        Args:
            whole: gradients of whole variables, by name.
            rows: gradients of single rows, by name of the variable: ids of shape (k,), in any order
                and possibly repeated, and values of shape (k, ...).
            pull: variables or slots to return after the update. Servers without a gradient send
                their current values.
            optimizers: optimizer that applies the gradient, by name of the variable; default "".
            scalars: optimizer scalars to set before the update, by `stored_name`; empty if the
                servers count steps themselves.
            assigned: values to set variables or slots to before the update, by name, with a sign as
                in `assign`.

        Raises:
            IndexError: an id is out of range.
        """
        pushes = self._gradients(whole, rows or {}, optimizers or {})
        for name, (value, sign) in (assigned or {}).items():
            placement, slot = self.known.find(name)
            for shard, part in enumerate(placement.parts(np.asarray(value))):
                full_name = shard_name(placement, shard) + slot
                pushes[placement.servers[shard]].assign(full_name, part, sign)
        wanted = self._wanted(pull)
        fields = {**self._update(), "worker": self._client_name, "scalars": dict(scalars or {})}
        messages = {
            server: Message("pull", {"names": wanted.names(server)}) for server in wanted.servers
        }
        for server, parts in pushes.items():
            seen = self._seen.of(server, parts.variables)
            messages[server] = parts.message(**fields, **seen, pull=wanted.names(server))
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.rows.pushing(rows or {}))
            for name in assigned or {}:
                stack.enter_context(self.rows.writing(self.known.find(name)[0].name))
            answers = self._rules.asked(messages, lambda some: self._ask(some, wanted.variables))
        num_discarded = sum(not answers[server].fields["is_used"] for server in pushes)
        for server in pushes:
            if answers[server].fields["is_used"]:
                self._seen.note_own_update(server)
        return Pushed(
            num_discarded < max(1, len(pushes)),
            num_discarded,
            min((answer.fields["version"] for answer in answers.values()), default=0),
            wanted.joined({server: answer.arrays for server, answer in answers.items()}),
        )

    def sum_over_workers(self, name: str, value: np.ndarray, place: int) -> np.ndarray:
        """Returns the sum of the values of all workers of the next synchronous update.

        `name` is a variable of that update, and `place` tells several sums before it apart. Late
        workers, whose gradients will be discarded, get their own values.
        """
        placement = self.known[name]
        server = placement.servers[0]
        seen = self._seen.of(server, [placement.versioned_name])
        fields = {**seen, "worker": self._client_name, "place": place}
        answers = self._ask({server: Message("sum", fields, [value])})
        return answers[server].arrays[0]

    def _gradients(
        self,
        whole: Mapping[str, np.ndarray],
        rows: Mapping[str, tuple[np.ndarray | DistinctKeys, np.ndarray]],
        optimizers: Mapping[str, str],
    ) -> dict[int, GradientParts]:
        """Splits gradients by server."""
        pushes: dict[int, GradientParts] = defaultdict(GradientParts)
        for name, gradient in whole.items():
            placement = self.known[name]
            for shard, part in enumerate(placement.parts(np.asarray(gradient))):
                to = pushes[placement.servers[shard]]
                to.add(placement, shard, optimizers.get(name, ""), part)
        for name, (ids, values) in rows.items():
            placement = self.known[name]
            known = isinstance(ids, DistinctKeys)
            updated = self._distinct.of(placement, ids if known else np.asarray(ids))
            sums = updated.summed(np.asarray(values))
            for shard, part, numbers in updated.held(placement):
                # Send empty parts too: servers count updates and wait for all workers.
                to = pushes[placement.servers[shard]]
                to.add_rows(placement, shard, optimizers.get(name, ""), numbers, sums[part])
        return pushes

    def _wanted(self, names: Sequence[str]) -> WholeVariables:
        wanted = WholeVariables()
        for name in dict.fromkeys(names):
            wanted.add(name, *self.known.find(name))
        return wanted

    def _note_lifetime(self, server: int, lifetime: int) -> None:
        self.rows.note_lifetime(server, lifetime)

    def _update(self) -> dict[str, Any]:
        """Returns the fields of a change that is an update, perhaps of a scheduled function."""
        fields = self._change()
        function: RunningFunction | None = getattr(self._local, "function", None)
        if function is not None:
            fields |= function.update_fields()
        return fields
