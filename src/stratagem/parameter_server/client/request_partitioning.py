"""Partitioning of requests by server: one message to each."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from stratagem.group.transport.wire import Message
from stratagem.parameter_server.client.distinct_rows import DistinctRows
from stratagem.parameter_server.client.shard_layout import KeyLayout, ShardLayout


class WholeVariables:
    """Request for whole variables, partitioned by server."""

    def __init__(self) -> None:
        self._parts: dict[int, list[tuple[str, int, str]]] = defaultdict(list)

    @property
    def servers(self) -> list[int]:
        """Servers with parts of the requested variables."""
        return list(self._parts)

    def add(self, name: str, placement: ShardLayout, slot: str = "") -> None:
        """Adds a variable, or its slot ":slot", under a name for the result."""
        for shard, server in enumerate(placement.servers):
            self._parts[server].append((name, shard, shard_name(placement, shard) + slot))

    def names(self, server: int) -> list[str]:
        """Returns the shard names to request from a server."""
        return [name for _, _, name in self._parts.get(server, ())]

    def variables(self, server: int) -> list[str]:
        """Returns the names, as passed to `add`, of the variables with shards on a server."""
        return [name for name, _, _ in self._parts.get(server, ())]

    def joined(self, answers: Mapping[int, Sequence[np.ndarray]]) -> dict[str, np.ndarray]:
        """Assembles whole variables, by name, from each server's arrays."""
        shards: dict[str, dict[int, np.ndarray]] = defaultdict(dict)
        for server, parts in self._parts.items():
            for (name, shard, _), array in zip(parts, answers[server], strict=True):
                shards[name][shard] = array
        return {name: _joined(own) for name, own in shards.items()}


class RequestParts:
    """Arrays for shards, partitioned by server."""

    def __init__(self) -> None:
        self._names: dict[int, list[str]] = defaultdict(list)
        self._arrays: dict[int, list[np.ndarray]] = defaultdict(list)

    def add(self, server: int, name: str, *arrays: np.ndarray) -> None:
        """Adds the arrays of one shard; all shards have the same number of arrays."""
        self._names[server].append(name)
        self._arrays[server] += arrays

    def messages(self, kind: str, **fields: object) -> dict[int, Message]:
        """Returns a message to each server, with `names` added to `fields`."""
        return {
            server: Message(kind, {**fields, "names": names}, self._arrays[server])
            for server, names in self._names.items()
        }


class GradientParts:
    """Gradients for one server."""

    def __init__(self) -> None:
        self.variables: list[str] = []
        self._whole: dict[str, np.ndarray] = {}
        self._rows: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        self._optimizers: dict[str, str] = {}
        self._assigned: dict[str, tuple[np.ndarray, int]] = {}

    def assign(self, name: str, value: np.ndarray, sign: int) -> None:
        """Adds the value of a shard, or of its slot, to set before the update."""
        self._assigned[name] = value, sign

    def add(self, placement: ShardLayout, shard: int, optimizer: str, gradient: np.ndarray) -> None:
        """Adds the gradient of a shard."""
        self._whole[self._noted(placement, shard, optimizer)] = gradient

    def add_rows(
        self,
        placement: ShardLayout,
        shard: int,
        optimizer: str,
        numbers: np.ndarray,
        values: np.ndarray,
    ) -> None:
        """Adds gradients of rows of a shard, possibly none, by their numbers in it."""
        self._rows[self._noted(placement, shard, optimizer)] = (numbers, values)

    def _noted(self, placement: ShardLayout, shard: int, optimizer: str) -> str:
        self.variables.append(placement.name)
        name = shard_name(placement, shard)
        if optimizer:
            self._optimizers[name] = optimizer
        return name

    def message(self, **fields: object) -> Message:
        """Returns the push message; `fields` are added to those that describe the arrays."""
        all_fields = {**fields, "whole": list(self._whole), "rows": list(self._rows)}
        all_fields["optimizers"] = self._optimizers
        of_rows = [array for pair in self._rows.values() for array in pair]
        if self._assigned:
            all_fields["assigned"] = {name: sign for name, (_, sign) in self._assigned.items()}
        assigned = [value for value, _ in self._assigned.values()]
        return Message("push", all_fields, [*self._whole.values(), *of_rows, *assigned])


# Lookups with more bytes of rows are split: shared memory holds three answers per connection.
_MOST_ANSWER_BYTES = 2**23


class RowLookup(NamedTuple):
    """Distinct ids of one table, or of its slot ":slot"."""

    placement: ShardLayout
    slot: str
    wanted: DistinctRows

    def joined(self, rows: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the rows of the distinct ids, from those of each shard that has any."""
        placement = self.placement
        if not rows:
            return np.empty((0, *placement.shape[1:]), placement.dtype)
        joined = rows[0] if len(rows) == 1 else np.concatenate(rows)
        if isinstance(placement, KeyLayout) and not self.slot:
            return placement.row_format.expanded(joined)
        return joined


class RowRequest:
    """Rows of several tables, to request with one message to each server.

    `held` has the number of the lookup and the server of each of its arrays, in order.
    """

    def __init__(self) -> None:
        self.parts = RequestParts()
        self.held: list[tuple[int, int]] = []
        self.answer_bytes = 0
        self._names: dict[int, list[str]] = defaultdict(list)

    def add(self, number: int, lookup: RowLookup) -> None:
        """Adds a lookup; servers without any of its rows are not asked."""
        placement, slot, wanted = lookup
        for shard, _, numbers in wanted.held(placement):
            if len(numbers):
                server = placement.servers[shard]
                self.parts.add(server, shard_name(placement, shard) + slot, numbers)
                self.held.append((number, server))
                self._names[server].append(placement.name)

    def variables(self, server: int) -> Sequence[str]:
        """Returns the names of the variables whose rows a server sends."""
        return self._names.get(server, ())


def row_requests(lookups: Sequence[RowLookup]) -> list[RowRequest]:
    """Returns one request for all lookups, or more if answers would be too large."""
    requests: list[RowRequest] = []
    for number, lookup in enumerate(lookups):
        placement, _, wanted = lookup
        row_bytes = math.prod(placement.shape[1:]) * np.dtype(placement.dtype).itemsize
        answer_bytes = len(wanted.ids) * row_bytes
        if not requests or requests[-1].answer_bytes + answer_bytes > _MOST_ANSWER_BYTES:
            requests.append(RowRequest())
        requests[-1].add(number, lookup)
        requests[-1].answer_bytes += answer_bytes
    return [one for one in requests if one.held]


def creation_messages(
    placement: ShardLayout,
    initial: np.ndarray | Callable[[int, int], np.ndarray] | None,
    pickled: Callable[[Any], bytes],
    **fields: object,
) -> dict[int, Message]:
    """Returns the messages that create a variable; `initial` as in `ServerClient.create`.

    `pickled` serializes a function that servers call. A table of keys is created by its spec alone:
    nothing pickled, so that a server can restart without a client.
    """
    if placement.is_keyed:
        values: list[list[np.ndarray]] = [[] for _ in placement.rows]
    elif callable(initial):
        values = [[np.frombuffer(pickled(initial), np.uint8)]] * len(placement.rows)
    else:
        parts = placement.parts(np.asarray(initial, np.dtype(placement.dtype)))
        values = [[part] for part in parts]
    requests, specs = RequestParts(), defaultdict[int, list[dict[str, Any]]](list)
    for shard, arrays in enumerate(values):
        server = placement.servers[shard]
        specs[server].append(placement.spec_of(shard))
        requests.add(server, shard_name(placement, shard), *arrays)
    messages = requests.messages("create", is_pickled=callable(initial), **fields)
    for server, message in messages.items():
        message.fields["specs"] = specs[server]
    return messages


def shard_name(placement: ShardLayout, shard: int) -> str:
    """Returns the name of a shard on its server."""
    return placement.name_of(shard)


def _joined(shards: Mapping[int, np.ndarray]) -> np.ndarray:
    if len(shards) == 1:
        return shards[0]
    return np.concatenate([shards[shard] for shard in range(len(shards))])
