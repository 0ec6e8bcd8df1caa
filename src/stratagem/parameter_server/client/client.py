"""`ServerClient`: reads and writes variables by name, on any number of servers."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import threading
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from typing import Any

import numpy as np

from stratagem import settings
from stratagem.environment import load
from stratagem.errors import UnavailableError, explain
from stratagem.group.transport.connection import Connections
from stratagem.group.transport.wire import Message
from stratagem.parameter_server.client.row_requests import (
    DistinctKeys,
    GradientParts,
    RequestParts,
    RowLookup,
    WholeVariables,
    creation_messages,
    distinct_rows,
    row_requests,
)
from stratagem.parameter_server.client.shard_layout import ShardLayout
from stratagem.parameter_server.server.changes import SeenVersions
from stratagem.parameter_server.server.shards import ASYNCHRONOUS, Pushed, UpdateMode, UpdateRule

# Optimizers that a client has sent, for servers that restart from their journals.
#
# A journal only describes an optimizer: code from a file is never executed. A restarted server asks
# for the optimizer with the first push.

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
        """Sends pushes by `ask`, and again to restarted servers once these have the optimizers.

        A worker usually has none of them: the coordinator sends them when it notices the restart.

        Raises:
            UnavailableError: no process has sent them within `STRATAGEM_PEER_TIMEOUT_S`.
        """
        answers, begin_s = ask(messages), time.monotonic()
        while lacking := [one for one, answer in answers.items() if answer.kind == "needs_rule"]:
            limit_s = float(settings.read("peer_timeout_s"))
            for server in lacking:
                needed = answers[server].fields["optimizers"]
                if {*needed} <= self.send(server, needed):
                    continue
                if time.monotonic() > begin_s + limit_s:
                    raise UnavailableError(
                        explain(
                            f"Parameter server {server} restarted from its journal and has waited "
                            f"{limit_s:g} s for the optimizers {sorted(needed)}.",
                            expected="the coordinator, or the worker that created an optimizer, to "
                            "send it again.",
                            fix="check that this process runs and reaches the server. Set "
                            "STRATAGEM_PEER_TIMEOUT_S to change the limit.",
                            code="SG602",
                        )
                    )
                threading.Event().wait(_POLL_S)
            answers |= ask({server: messages[server] for server in lacking})
        return answers


class ServerClient:
    """Reads and writes variables by name, wherever their shards are. Thread-safe.

    `client_name` identifies this worker to synchronous updates, also after a restart. With None
    each thread counts as a worker.
    """

    def __init__(self, connections: Connections, client_name: str | None = None) -> None:
        self._connections = connections
        self._local = threading.local()
        self._numbers = itertools.count(1)
        self._seen = SeenVersions()
        self._rules = SentRules(connections)
        self.num_repeated = 0
        self._client_name = client_name
        self._layouts: dict[str, ShardLayout] = {}
        self._pickle: Any = load(
            "cloudpickle", needed_by="a client of parameter servers", install="stratagem[ray]"
        )

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
        own = {**fields, **self._change()}
        return self._connections.ask_all(
            {
                server: Message(kind, {**own, "names": list(some), "tables": dict(some)})
                for server, some in tables.items()
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
        None); `names` of variables; `waiting` (names of workers that wait for
        others); `staleness`; `num_discarded`; `updates` (numbers of applied, resent and
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

    def journal(self) -> dict[int, int | None]:
        """Makes all servers write their journals.

        Returns the number of updates on each disk; None for a server without a journal.
        """
        servers = range(self.num_servers)
        answers = self._connections.ask_all(dict.fromkeys(servers, Message("journal")))
        return {server: answer.fields["journaled_version"] for server, answer in answers.items()}

    @contextlib.contextmanager
    def in_function(
        self, name: str, *, is_rerun: bool = False, order: int = 0, first_open: int = 0
    ) -> Generator[None]:
        """Identifies the updates of this thread by a scheduled function, in a `with` block.

        Servers make each of its updates once, however often it runs, if it makes them in the same
        order each time. `is_rerun` is True if it may have run before. `order` is the number of the
        coordinator's message to this worker; servers may forget the functions of messages before
        `first_open`, because none of them will run again.
        """
        fields = {"function": name, "order": order, "first_open": first_open}
        if is_rerun:
            fields["is_rerun"] = True
        previous = getattr(self._local, "function", None)
        self._local.function = fields, itertools.count(1)
        try:
            yield
        finally:
            self._local.function = previous

    def know(self, placement: ShardLayout) -> None:
        """Registers the layout of a variable that another process created."""
        self._layouts[placement.name] = placement

    def placement_of(self, name: str) -> ShardLayout:
        """Returns the layout of a variable, or of the variable that a slot belongs to.

        Raises a KeyError if the variable is not registered here.
        """
        return self._find(name)[0]

    @property
    def layouts(self) -> list[ShardLayout]:
        """Layouts of the variables that were created or registered here."""
        return list(self._layouts.values())

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

    def pull(self, names: Sequence[str]) -> dict[str, np.ndarray]:
        """Returns whole variables, or slots as "name:slot". The arrays must not be modified."""
        wanted = self._wanted(names)
        messages = {
            server: Message("pull", {"names": wanted.names(server)}) for server in wanted.servers
        }
        answers = self._ask(messages, wanted.variables)
        return wanted.joined({server: answer.arrays for server, answer in answers.items()})

    def pull_rows(self, name: str, ids: np.ndarray) -> np.ndarray:
        """Returns rows of a variable or slot; a repeated row is sent once.

        `ids` may have any shape; the result has shape (*ids.shape, ...), and must not be modified.

        Raises:
            IndexError: an id is out of range.
        """
        return self.pull_rows_of([(name, ids)])[0]

    def pull_rows_of(
        self, wanted: Sequence[tuple[str, np.ndarray | DistinctKeys]]
    ) -> list[np.ndarray]:
        """Returns rows of several variables or slots, which may repeat; see `pull_rows`.

        All of them are requested with one message to each server, unless answers are large. Equal
        rows of several lookups are sent once.
        """
        by_name: dict[str, list[int]] = defaultdict(list)
        for place, (name, _) in enumerate(wanted):
            by_name[name].append(place)
        lookups = [
            self._lookup(name, [wanted[place][1] for place in places])
            for name, places in by_name.items()
        ]
        results: dict[int, np.ndarray] = {}
        fetched = self._fetched(lookups)
        for places, one, distinct in zip(by_name.values(), lookups, fetched, strict=True):
            rows, begin = one.wanted.expanded(distinct), 0
            for place in places:
                shape = np.shape(wanted[place][1])
                end = begin + math.prod(shape)
                results[place] = rows[begin:end].reshape((*shape, *one.placement.shape[1:]))
                begin = end
        return [results[place] for place in range(len(wanted))]

    def assign(self, name: str, value: np.ndarray, *, sign: int = 0) -> None:
        """Writes a whole variable or slot: `sign` 0 sets it, 1 adds the value, -1 subtracts it."""
        placement, slot = self._find(name)
        parts = RequestParts()
        for shard, part in enumerate(placement.parts(np.asarray(value))):
            parts.add(placement.servers[shard], placement.name_of(shard) + slot, part)
        self._ask(parts.messages("assign", sign=sign, **self._update()))

    def scatter(self, name: str, ids: np.ndarray, values: np.ndarray, *, sign: int = 0) -> None:
        """Writes rows of a variable or slot: `sign` 0 sets them, 1 adds, -1 subtracts `values`.

        `ids` has shape (k,) and `values` (k, ...). Repeated rows are added up; with `sign` 0 the
        last one is set.

        Raises:
            IndexError: an id is out of range.
        """
        placement, slot = self._find(name)
        written = distinct_rows(placement, np.asarray(ids))
        values = np.asarray(values)
        values = written.summed(values) if sign else written.last(values)
        parts = RequestParts()
        for shard, part, numbers in written.held(placement):
            if len(numbers):
                full_name = placement.name_of(shard) + slot
                parts.add(placement.servers[shard], full_name, numbers, values[part])
        self._ask(parts.messages("scatter", sign=sign, **self._update()))

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
            placement = self._layouts[name]
            for shard, server in enumerate(placement.servers):
                shards[server].append(placement.name_of(shard))
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
            placement, slot = self._find(name)
            for shard, part in enumerate(placement.parts(np.asarray(value))):
                full_name = placement.name_of(shard) + slot
                pushes[placement.servers[shard]].assigned[full_name] = part, sign
        wanted = self._wanted(pull)
        fields = {**self._update(), "worker": self._client_name, "scalars": dict(scalars or {})}
        messages = {
            server: Message("pull", {"names": wanted.names(server)}) for server in wanted.servers
        }
        for server, parts in pushes.items():
            seen = self._seen.of(server, parts.variables)
            messages[server] = parts.message(**fields, **seen, pull=wanted.names(server))
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
        placement = self._layouts[name]
        server = placement.servers[0]
        seen = self._seen.of(server, [placement.name])
        fields = {**seen, "worker": self._client_name, "place": place}
        answers = self._ask({server: Message("sum", fields, [value])})
        return answers[server].arrays[0]

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
            self.num_repeated += bool(answer.fields.get("is_repeated"))
        return answers

    def _ask_all(self, kind: str, arrays: Sequence[np.ndarray] = (), **fields: object) -> None:
        message = Message(kind, {**fields, **self._change()}, arrays)
        self._ask(dict.fromkeys(range(len(self._connections)), message))

    def _change(self) -> dict[str, Any]:
        """Returns fields that identify a change, so that servers apply a resent one only once.

        Each thread is a separate client with one change at a time.
        """
        client = getattr(self._local, "client", None)
        if client is None:
            client = self._local.client = uuid.uuid4().hex
        return {"client": client, "number": next(self._numbers)}

    def _find(self, name: str) -> tuple[ShardLayout, str]:
        """Returns the layout of a variable or of a slot "variable:slot", and ":slot" or ""."""
        if name in self._layouts:
            return self._layouts[name], ""
        variable, colon, slot = name.rpartition(":")
        return self._layouts[variable], colon + slot

    def _lookup(self, name: str, several: Sequence[np.ndarray | DistinctKeys]) -> RowLookup:
        """Returns the lookup of one or more arrays of ids in the same table or slot."""
        placement, slot = self._find(name)
        first = several[0]
        if len(several) == 1:
            ids = first if isinstance(first, DistinctKeys) else np.asarray(first).reshape(-1)
        else:
            ids = np.concatenate([np.asarray(one).reshape(-1) for one in several])
        return RowLookup(placement, slot, distinct_rows(placement, ids))

    def _fetched(self, lookups: Sequence[RowLookup]) -> list[np.ndarray]:
        """Returns the rows of the distinct ids of each lookup."""
        rows: list[list[np.ndarray]] = [[] for _ in lookups]
        for request in row_requests(lookups):
            answers = self._ask(request.parts.messages("pull_rows"), request.variables)
            arrays = {server: iter(answer.arrays) for server, answer in answers.items()}
            for number, server in request.held:
                rows[number].append(next(arrays[server]))
        return [one.joined(own) for own, one in zip(rows, lookups, strict=True)]

    def _gradients(
        self,
        whole: Mapping[str, np.ndarray],
        rows: Mapping[str, tuple[np.ndarray | DistinctKeys, np.ndarray]],
        optimizers: Mapping[str, str],
    ) -> dict[int, GradientParts]:
        """Splits gradients by server."""
        pushes: dict[int, GradientParts] = defaultdict(GradientParts)
        for name, gradient in whole.items():
            placement = self._layouts[name]
            for shard, part in enumerate(placement.parts(np.asarray(gradient))):
                to = pushes[placement.servers[shard]]
                to.whole[to.noted(placement, shard, optimizers)] = part
        for name, (ids, values) in rows.items():
            placement = self._layouts[name]
            known = isinstance(ids, DistinctKeys)
            updated = distinct_rows(placement, ids if known else np.asarray(ids))
            sums = updated.summed(np.asarray(values))
            for shard, part, numbers in updated.held(placement):
                # Send empty parts too: servers count updates and wait for all workers.
                to = pushes[placement.servers[shard]]
                to.rows[to.noted(placement, shard, optimizers)] = numbers, sums[part]
        return pushes

    def _wanted(self, names: Sequence[str]) -> WholeVariables:
        wanted = WholeVariables()
        for name in dict.fromkeys(names):
            wanted.add(name, *self._find(name))
        return wanted

    def _update(self) -> dict[str, Any]:
        """Returns the fields of a change that is an update, perhaps of a scheduled function."""
        fields = self._change()
        function = getattr(self._local, "function", None)
        if function is not None:
            of_function, places = function
            fields |= {**of_function, "place": next(places)}
        return fields
