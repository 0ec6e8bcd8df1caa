"""Variables on parameter servers, as one process reads and changes them."""

from __future__ import annotations

import dataclasses
import itertools
import threading
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from stratagem.optional_libraries import load
from stratagem.parameter_server.client.request_partitioning import (
    GradientParts,
    RequestParts,
    WholeVariables,
    row_parts,
    shard_name,
)
from stratagem.parameter_server.client.shard_layout import ShardLayout
from stratagem.parameter_server.server.rows import combine_rows
from stratagem.parameter_server.server.shards import ShardSpec
from stratagem.parameter_server.server.updates import ASYNCHRONOUS, Pushed, UpdateMode, UpdateRule
from stratagem.parameter_server.server.versions import SeenVersions
from stratagem.parameter_server.transport.connection import Connections
from stratagem.parameter_server.transport.wire import Message

__all__ = ["ServerClient"]


class ServerClient:
    """Reads and changes variables by name, wherever their rows are. Any thread may call it.

    Args:
        connections: to the servers.
        client_name: of this worker, by which synchronous updates know it again when it is started
            anew; None where each thread is a worker of its own.
    """

    def __init__(self, connections: Connections, client_name: str | None = None) -> None:
        self._connections = connections
        self._client_name = client_name
        self._placements: dict[str, ShardLayout] = {}
        self._local = threading.local()
        self._numbers = itertools.count(1)
        self._seen = SeenVersions()
        self._pickle: Any = load(
            "cloudpickle", needed_by="a client of parameter servers", install="stratagem[ray]"
        )

    @property
    def lost_updates(self) -> int:
        """Number of updates that servers lost when they died, according to their answers."""
        return self._seen.num_lost

    def know(self, placement: ShardLayout) -> None:
        """Notes where a variable is that another process has made.

        Args:
            placement: where it is.
        """
        self._placements[placement.name] = placement

    def placement_of(self, name: str) -> ShardLayout:
        """Returns where a variable is, or the one that a slot is of.

        Args:
            name: of the variable, or of the slot.

        Raises:
            KeyError: it is not known here.
        """
        return self._find(name)[0]

    def create(
        self, placement: ShardLayout, initial: np.ndarray | Callable[[int, int], np.ndarray]
    ) -> bool:
        """Makes a variable, unless the servers have it: they outlive a client.

        Args:
            placement: where it is to be.
            initial: its value; or a function of the first row and the number of rows that returns
                so much of it, called on the servers, for what is too large for one process.

        Returns:
            Whether it was made.

        Raises:
            ValueError: the servers have one of that name that is something else.
        """
        self.know(placement)
        is_pickled = callable(initial)
        if is_pickled:
            pickled = np.frombuffer(self._pickle.dumps(initial), np.uint8)
            values = [pickled] * len(placement.rows)
        else:
            values = placement.parts(np.asarray(initial, np.dtype(placement.dtype)))
        specs: dict[int, list[dict[str, Any]]] = defaultdict(list)
        parts = RequestParts()
        for shard, value in enumerate(values):
            name, server = shard_name(placement, shard), placement.servers[shard]
            spec = ShardSpec(
                name,
                placement.shape_of(shard),
                placement.dtype,
                placement.first_rows[shard],
                placement.has_rows,
            )
            specs[server].append(dataclasses.asdict(spec))
            parts.add(server, name, value)
        messages = parts.messages("create", is_pickled=is_pickled, **self._change())
        for server, message in messages.items():
            message.fields["specs"] = specs[server]
        answers = self._ask(messages)
        return any(answer.fields["is_new"] for answer in answers.values())

    def pull(self, names: Sequence[str]) -> dict[str, np.ndarray]:
        """Returns whole variables.

        Args:
            names: theirs; "name:slot" is a slot of the optimizer.

        Returns:
            Arrays by name, which must not be changed.
        """
        wanted = self._wanted(names)
        messages = {
            server: Message("pull", {"names": wanted.names(server)}) for server in wanted.servers
        }
        answers = self._ask(messages, wanted.variables)
        return wanted.joined({server: answer.arrays for server, answer in answers.items()})

    def pull_rows(self, name: str, ids: np.ndarray) -> np.ndarray:
        """Returns rows of a variable; each is sent once, however often it is asked for.

        Args:
            name: of the variable, or of a slot.
            ids: integers of any shape.

        Returns:
            Array of shape (*ids.shape, ...).

        Raises:
            IndexError: an id that the variable does not have.
        """
        placement, slot = self._find(name)
        unique, places = np.unique(ids, return_inverse=True)
        parts = RequestParts()
        servers: list[int] = []  # of the shards that have any of the rows, in their order
        for shard, part in row_parts(placement, unique):
            if part.stop > part.start:
                servers.append(placement.servers[shard])
                numbers = unique[part] - placement.first_rows[shard]
                parts.add(servers[-1], shard_name(placement, shard) + slot, numbers)
        answers = self._ask(parts.messages("pull_rows"), lambda server: [name])
        arrays = {server: iter(answer.arrays) for server, answer in answers.items()}
        rows = [next(arrays[server]) for server in servers]
        row_shape = placement.shape[1:]
        joined = np.concatenate(rows) if rows else np.empty((0, *row_shape), placement.dtype)
        return np.take(joined, places.reshape(-1), axis=0).reshape(*np.shape(ids), *row_shape)

    def assign(self, name: str, value: np.ndarray, *, sign: int = 0) -> None:
        """Sets a variable, or changes it.

        Args:
            name: its name, or that of a slot.
            value: of its shape.
            sign: 0 sets it; 1 adds the value, -1 subtracts it.
        """
        placement, slot = self._find(name)
        parts = RequestParts()
        for shard, part in enumerate(placement.parts(np.asarray(value))):
            parts.add(placement.servers[shard], shard_name(placement, shard) + slot, part)
        self._ask(parts.messages("assign", sign=sign, **self._change()))

    def scatter(self, name: str, ids: np.ndarray, values: np.ndarray, *, sign: int = 0) -> None:
        """Sets rows of a variable, or changes them.

        Args:
            name: its name, or that of a slot.
            ids: of shape (k,); rows that come more than once are added up, or must be the same.
            values: of shape (k, ...).
            sign: 0 sets them; 1 adds the values, -1 subtracts them.

        Raises:
            IndexError: an id that the variable does not have.
        """
        placement, slot = self._find(name)
        if sign:
            ids, values = combine_rows(np.asarray(ids), np.asarray(values))
        else:
            ids, last = np.unique(np.asarray(ids)[::-1], return_index=True)
            values = np.asarray(values)[::-1][last]
        parts = RequestParts()
        for shard, part in row_parts(placement, ids):
            if part.stop > part.start:
                numbers = ids[part] - placement.first_rows[shard]
                name = shard_name(placement, shard) + slot
                parts.add(placement.servers[shard], name, numbers, values[part])
        self._ask(parts.messages("scatter", sign=sign, **self._change()))

    def set_rule(
        self,
        rule: UpdateRule,
        names: Sequence[str],
        mode: UpdateMode = ASYNCHRONOUS,
        optimizer: str = "",
    ) -> None:
        """Gives all servers the optimizer of these variables.

        Args:
            rule: the optimizer's.
            names: of the variables that it trains.
            mode: when gradients are applied, of all optimizers; may be changed by another call.
            optimizer: its name, without a dot. What it keeps has names that begin with it.
        """
        pickled = np.frombuffer(self._pickle.dumps(rule), np.uint8)
        shards: dict[int, list[str]] = {server: [] for server in range(len(self._connections))}
        for name in names:
            placement = self._placements[name]
            for shard, server in enumerate(placement.servers):
                shards[server].append(shard_name(placement, shard))
        fields = {"mode": dataclasses.asdict(mode), "optimizer": optimizer, **self._change()}
        self._ask(
            {
                server: Message("rule", {**fields, "names": held}, [pickled])
                for server, held in shards.items()
            }
        )

    def drop_rule(self, optimizer: str) -> None:
        """Has all servers forget an optimizer, with all that it keeps.

        Args:
            optimizer: its name.
        """
        self._tell_all("drop_rule", optimizer=optimizer)

    def push(
        self,
        whole: Mapping[str, np.ndarray],
        rows: Mapping[str, tuple[np.ndarray, np.ndarray]] | None = None,
        *,
        pull: Sequence[str] = (),
        optimizers: Mapping[str, str] | None = None,
        scalars: Mapping[str, float] | None = None,
    ) -> Pushed:
        """Sends gradients, and returns when the servers have applied or discarded them.

        Every server that holds some of these variables counts one update. With synchronous updates
        all workers must push gradients of the same variables. Which workers are too late each
        server finds by itself, as each accumulator does in TensorFlow: with backup workers, some
        may use a worker's gradients when others do not.

        Args:
            whole: of variables, by name.
            rows: of single rows: ids of shape (k,), in any order, repeated or not, and gradients of
                shape (k, ...), by name of the variable.
            pull: names of variables, or of slots, that are wanted as they are then; those on
                servers that get no gradient, as they are now.
            optimizers: which one applies them, by name of the variable; "" where none is named.
            scalars: what optimizers keep once, by `kept_name`, as it is to be when they apply them;
                none where the servers count for themselves.

        Returns:
            What has become of them, and the values.

        Raises:
            IndexError: an id that a variable does not have.
        """
        pushes = self._gradients(whole, rows or {}, optimizers or {})
        wanted = self._wanted(pull)
        fields = {**self._change(), "worker": self._client_name, "scalars": dict(scalars or {})}
        messages = {
            server: Message("pull", {"names": wanted.names(server)}) for server in wanted.servers
        }
        for server, parts in pushes.items():
            seen = self._seen.of(server, parts.variables)
            messages[server] = parts.message(**fields, **seen, pull=wanted.names(server))
        answers = self._ask(messages, wanted.variables)
        num_discarded = sum(not answers[server].fields["is_used"] for server in pushes)
        return Pushed(
            num_discarded < max(1, len(pushes)),
            num_discarded,
            min((answer.fields["version"] for answer in answers.values()), default=0),
            wanted.joined({server: answer.arrays for server, answer in answers.items()}),
        )

    def expect(self, num_needed: int) -> None:
        """Changes how many workers make a synchronous update: one was lost, or has come back.

        Args:
            num_needed: how many; an update for which so many wait is made at once.
        """
        self._tell_all("expect", num_needed=num_needed)

    def flush(self) -> None:
        """Applies gradients that wait for those of other workers: no more will come."""
        self._tell_all("flush")

    def scalars(self, server: int = 0) -> dict[str, np.ndarray]:
        """Returns what an optimizer keeps once, as one server has it.

        Args:
            server: its index.
        """
        answer = self._connections.ask(server, Message("scalars"))
        return dict(zip(answer.fields["names"], answer.arrays, strict=True))

    def set_scalar(self, name: str, value: np.ndarray) -> None:
        """Sets one of the numbers that an optimizer keeps once, on all servers.

        Args:
            name: its name.
            value: its value.
        """
        self._tell_all("set_scalar", [np.asarray(value)], name=name)

    def describe(self) -> dict[int, dict[str, Any]]:
        """Returns what each server tells of itself.

        Returns:
            By index of the server: `version`, its number of updates; `journaled_version`, how many
            of them are on the disk, and `journal_error`, why no more are, each None if there is
            none; `restored_version`, with how many it began, None if with nothing; `names`, of what
            it holds; `num_waiting`, how many workers wait for others, and `waiting`, their names;
            `staleness`; `num_discarded`.
        """
        servers = range(len(self._connections))
        answers = self._ask(dict.fromkeys(servers, Message("describe")))
        return {server: answer.fields for server, answer in answers.items()}

    def staleness(self) -> dict[int, int]:
        """Returns how many updates a server had made since a gradient's values were read.

        Returns:
            Of each such number, how many pushes there were that were used, over all servers.
        """
        counts: Counter[int] = Counter()
        for told in self.describe().values():
            counts.update(dict(told["staleness"]))
        return dict(sorted(counts.items()))

    def discarded(self) -> int:
        """Returns how many pushes were not used, over all servers."""
        return sum(told["num_discarded"] for told in self.describe().values())

    def journal(self) -> dict[int, int]:
        """Lets all servers write what has changed to their journals, and waits until they have.

        Returns:
            By index of the server, how many updates are on the disk.
        """
        servers = range(len(self._connections))
        answers = self._connections.ask_all(dict.fromkeys(servers, Message("journal")))
        return {server: answer.fields["journaled_version"] for server, answer in answers.items()}

    def _find(self, name: str) -> tuple[ShardLayout, str]:
        if name in self._placements:
            return self._placements[name], ""
        variable, colon, slot = name.rpartition(":")
        return self._placements[variable], colon + slot

    def _gradients(
        self,
        whole: Mapping[str, np.ndarray],
        rows: Mapping[str, tuple[np.ndarray, np.ndarray]],
        optimizers: Mapping[str, str],
    ) -> dict[int, GradientParts]:
        """Splits gradients by server."""
        pushes: dict[int, GradientParts] = defaultdict(GradientParts)
        for name, gradient in whole.items():
            placement = self._placements[name]
            for shard, part in enumerate(placement.parts(np.asarray(gradient))):
                to = pushes[placement.servers[shard]]
                to.add(placement, shard, optimizers.get(name, ""), part)
        for name, (ids, values) in rows.items():
            placement = self._placements[name]
            numbers, sums = combine_rows(np.asarray(ids), np.asarray(values))
            for shard, part in row_parts(placement, numbers):
                # Also without any: a server counts updates, and waits for all workers.
                to = pushes[placement.servers[shard]]
                optimizer = optimizers.get(name, "")
                to.add_rows(placement, shard, optimizer, numbers[part], sums[part])
        return pushes

    def _wanted(self, names: Sequence[str]) -> WholeVariables:
        wanted = WholeVariables()
        for name in dict.fromkeys(names):
            wanted.add(name, *self._find(name))
        return wanted

    def _ask(
        self,
        messages: dict[int, Message],
        variables: Callable[[int], Sequence[str]] = lambda server: (),
    ) -> dict[int, Message]:
        """Asks, and notes the versions of the variables that come from each server."""
        answers = self._connections.ask_all(messages)
        for server, answer in answers.items():
            self._seen.note(server, answer, variables(server))
        return answers

    def _tell_all(self, kind: str, arrays: Sequence[np.ndarray] = (), **fields: Any) -> None:
        message = Message(kind, {**fields, **self._change()}, arrays)
        self._ask(dict.fromkeys(range(len(self._connections)), message))

    def _change(self) -> dict[str, Any]:
        """Fields by which a change is made once. Each thread is a client, with one at a time."""
        client = getattr(self._local, "client", None)
        if client is None:
            client = self._local.client = uuid.uuid4().hex
        return {"client": client, "number": next(self._numbers)}
