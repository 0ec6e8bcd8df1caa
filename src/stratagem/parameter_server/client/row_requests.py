"""Partitioning of requests by server: one message to each."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from stratagem.errors import explain
from stratagem.group.transport.wire import Message
from stratagem.parameter_server.client.shard_layout import KeyLayout, ShardLayout
from stratagem.parameter_server.server.shards import aligned_empty, distinct, sum_rows


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
            self._parts[server].append((name, shard, placement.name_of(shard) + slot))

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
    """Gradients for one server, by name of the shard, in `whole` and `rows`.

    `rows` has row numbers, possibly none, and their gradients. `assigned` has the values to set
    before the update, with signs, by name of a shard or of its slot. `variables` are those with
    gradients.
    """

    def __init__(self) -> None:
        self.variables: list[str] = []
        self.whole: dict[str, np.ndarray] = {}
        self.rows: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        self.assigned: dict[str, tuple[np.ndarray, int]] = {}
        self._optimizers: dict[str, str] = {}

    def noted(self, placement: ShardLayout, shard: int, optimizers: Mapping[str, str]) -> str:
        """Notes the optimizer of a shard, of those by variable, and returns the shard's name."""
        self.variables.append(placement.name)
        name = placement.name_of(shard)
        if optimizer := optimizers.get(placement.name):
            self._optimizers[name] = optimizer
        return name

    def message(self, **fields: object) -> Message:
        """Returns the push message; `fields` are added to those that describe the arrays."""
        all_fields = {**fields, "whole": list(self.whole), "rows": list(self.rows)}
        all_fields["optimizers"] = self._optimizers
        of_rows = [array for pair in self.rows.values() for array in pair]
        if self.assigned:
            all_fields["assigned"] = {name: sign for name, (_, sign) in self.assigned.items()}
        assigned = [value for value, _ in self.assigned.values()]
        return Message("push", all_fields, [*self.whole.values(), *of_rows, *assigned])


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
                self.parts.add(server, placement.name_of(shard) + slot, numbers)
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
        requests.add(server, placement.name_of(shard), *arrays)
    messages = requests.messages("create", is_pickled=callable(initial), **fields)
    for server, message in messages.items():
        message.fields["specs"] = specs[server]
    return messages


def _joined(shards: Mapping[int, np.ndarray]) -> np.ndarray:
    if len(shards) == 1:
        return shards[0]
    return np.concatenate([shards[shard] for shard in range(len(shards))])


# Distinct ids of lookups and gradients, by shard: rows of all ids from theirs, and back.


@dataclasses.dataclass(frozen=True)
class DistinctRows:
    """Distinct ids, those of one shard after those of another.

    Args:
        ids: the distinct ids, of shape (n,).
        places: position in `ids` of each requested id, of shape (k,).
        parts: slice of `ids` in each shard.
        is_request: True if `ids` are the requested ones, in their order.
    """

    ids: np.ndarray
    places: np.ndarray
    parts: Sequence[slice]
    is_request: bool = False

    def expanded(self, rows: np.ndarray) -> np.ndarray:
        """Returns a row for each requested id, from rows of the distinct ids."""
        if self.is_request:
            return rows
        out = aligned_empty((len(self.places), *rows.shape[1:]), rows.dtype)
        # "clip" writes directly to `out`: places are always valid.
        return np.take(rows, self.places, axis=0, out=out, mode="clip")

    def summed(self, rows: np.ndarray) -> np.ndarray:
        """Returns the sum of the rows of each distinct id, from a row for each requested id."""
        return rows if self.is_request else sum_rows(self.places, len(self.ids), rows)

    def last(self, rows: np.ndarray) -> np.ndarray:
        """Returns the last row of each distinct id, from a row for each requested id."""
        chosen = np.empty(len(self.ids), np.intp)
        chosen[self.places] = np.arange(len(self.places))  # the last of equal places is kept
        return rows[chosen]

    def held(self, placement: ShardLayout) -> Iterator[tuple[int, slice, np.ndarray]]:
        """Yields each shard with the slice of its ids, and their row numbers in it, or keys."""
        for shard, part in enumerate(self.parts):
            yield shard, part, placement.numbers_of(shard, self.ids[part])


@dataclasses.dataclass(frozen=True)
class DistinctKeys:
    """Distinct keys in the order of the shards of a layout, to request and to push as they are.

    As an array, they are the keys.
    """

    layout: ShardLayout
    rows: DistinctRows

    @classmethod
    def ordered(cls, layout: ShardLayout, keys: np.ndarray) -> tuple[DistinctKeys, np.ndarray]:
        """Orders distinct keys, and returns the position in `keys` of each."""
        order, parts = _by_shard(layout, keys)
        numbers = np.arange(len(keys), dtype=np.int32)
        rows = DistinctRows(keys[order], numbers, parts, is_request=True)
        return cls(layout, rows), numbers[order]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.rows.ids, dtype) if copy else np.asarray(self.rows.ids, dtype)


def _require_ids(placement: ShardLayout, ids: np.ndarray) -> None:
    """Raises IndexError if an id is out of range."""
    if not len(ids):
        return
    lowest, highest = int(ids.min()), int(ids.max())
    num_rows = placement.shape[0] if placement.shape else 0
    if lowest < 0 or highest >= num_rows:
        valid = f"ids from 0 to {num_rows - 1}" if num_rows else "no ids: it has no rows"
        raise IndexError(
            explain(
                f"Ids from {lowest} to {highest} were looked up in {placement.name!r}.",
                expected=f"{valid}.",
                fix="make the table larger, or map ids into its range, for example by a hash.",
                code="SG607",
            )
        )


def _require_keys(placement: ShardLayout, keys: np.ndarray) -> None:
    """Raises TypeError if keys are not integers. Messages never contain keys: they may be private.

    An empty array may have any dtype, as of an empty list.
    """
    if len(keys) and keys.dtype.kind not in "iu":
        raise TypeError(
            explain(
                f"Keys of dtype {keys.dtype} were looked up in {placement.name!r}.",
                expected="64-bit integers.",
                fix="hash other values to 64 bits first.",
            )
        )


def distinct_rows(placement: ShardLayout, ids: np.ndarray | DistinctKeys) -> DistinctRows:
    """Returns the distinct ids of `ids`, which has shape (k,); keys for a table of keys.

    Raises:
        IndexError: an id is out of range.
        TypeError: keys are not integers.
    """
    if isinstance(ids, DistinctKeys):
        if ids.layout is placement:
            return ids.rows
        ids = ids.rows.ids  # the layout was received again meanwhile
    if placement.is_keyed:
        _require_keys(placement, ids)
        ids = ids.astype(np.int64, copy=False)
    else:
        ids = ids.astype(np.intp, copy=False)
        _require_ids(placement, ids)
    found, places = distinct(ids)
    is_request = len(found) == len(ids) and not placement.is_split
    if is_request:  # no copy of the rows in another order
        return DistinctRows(ids, np.arange(len(ids)), [slice(0, len(ids))], is_request)
    order, parts = _by_shard(placement, found)
    numbers = np.empty(len(found), np.int32)
    numbers[order] = np.arange(len(found), dtype=np.int32)
    return DistinctRows(found[order], numbers[places], parts)


def _by_shard(placement: ShardLayout, ids: np.ndarray) -> tuple[np.ndarray | slice, list[slice]]:
    """Returns the order of the ids by shard, and the slice of each shard."""
    if not placement.is_split:
        return slice(None), [slice(0, len(ids))]
    shards = placement.shards_of(ids)
    counts = np.bincount(shards, minlength=len(placement.rows))
    # Small integers are sorted in linear time.
    small = shards.astype(np.min_scalar_type(len(placement.rows)))
    return np.argsort(small, kind="stable"), _slices(counts.tolist())


def _slices(counts: Sequence[int]) -> list[slice]:
    ends = [*itertools.accumulate(counts)]
    return [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]
