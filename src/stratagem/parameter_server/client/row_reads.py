"""Lookups of table rows: each distinct row once, from the cache or from its server.

The lookups of a step are one request to each server, however many tables there are.
"""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from stratagem.group.transport.wire import Message
from stratagem.parameter_server.client.cached_rows import CachedRows
from stratagem.parameter_server.client.distinct_rows import DistinctIds, DistinctKeys, DistinctRows
from stratagem.parameter_server.client.key_layout import KeyLayout
from stratagem.parameter_server.client.request_partitioning import RequestParts, shard_name
from stratagem.parameter_server.client.row_cache import RowCache
from stratagem.parameter_server.client.shard_layout import ShardLayout
from stratagem.parameter_server.server.versions import SeenVersions

# Lookups with more bytes of rows are split: shared memory holds three answers per connection.
_MOST_ANSWER_BYTES = 2**23
_NOTHING = np.empty(0)

_Ask = Callable[[dict[int, Message], Callable[[int], Sequence[str]]], dict[int, Message]]


class RowRequest(NamedTuple):
    """Rows of a variable or of its slot ":slot", for ids of any shape; the ids may be keys."""

    placement: ShardLayout
    slot: str
    ids: np.ndarray
    distinct: DistinctKeys | None = None  # the same ids, if it is known that they are distinct


class RowReads:
    """Reads rows of variables. Thread-safe.

    `ask` sends requests and records the versions in the answers. `row_cache` None reads all rows
    from the servers. `distinct` finds the distinct ids of a lookup.
    """

    def __init__(
        self,
        ask: _Ask,
        seen: SeenVersions,
        row_cache: RowCache | None,
        distinct: DistinctIds,
    ) -> None:
        self._ask = ask
        self._seen = seen
        self._distinct = distinct
        self.cached: CachedRows | None = None
        if row_cache is not None and row_cache.max_age_steps > 0:
            self.cached = CachedRows(row_cache)

    def pull(self, requests: Sequence[RowRequest], *, may_be_cached: bool) -> list[np.ndarray]:
        """Returns the rows of each request, all in one message to each server if they fit.

        Equal rows of several requests are sent once.
        """
        by_table: dict[tuple[str, str], list[int]] = defaultdict(list)
        for number, one in enumerate(requests):
            by_table[one.placement.name, one.slot].append(number)
        lookups = [self._lookup([requests[number] for number in own]) for own in by_table.values()]
        found = self._rows(lookups, may_be_cached=may_be_cached)
        results: list[np.ndarray] = [_NOTHING] * len(requests)
        for numbers, rows in zip(by_table.values(), found, strict=True):
            begin = 0
            for number in numbers:
                one = requests[number]
                end = begin + one.ids.size
                shape = (*one.ids.shape, *one.placement.shape[1:])
                results[number] = rows[begin:end].reshape(shape)
                begin = end
        return results

    def _lookup(self, requests: Sequence[RowRequest]) -> _TableLookup:
        """Returns the lookup of one or more requests of the same table."""
        flat = [one.ids.reshape(-1) for one in requests]
        ids: Any = flat[0] if len(flat) == 1 else np.concatenate(flat)
        if len(flat) == 1 and requests[0].distinct is not None:
            ids = requests[0].distinct
        placement = requests[0].placement
        return _TableLookup(placement, requests[0].slot, self._distinct.of(placement, ids))

    def _rows(self, lookups: Sequence[_TableLookup], *, may_be_cached: bool) -> list[np.ndarray]:
        """Returns a row for each requested id of each lookup."""
        cached = self.cached
        if cached is None or not may_be_cached or any(one.slot for one in lookups):
            fetched = self._fetch(lookups)
            return [
                one.wanted.expanded(rows) for one, (rows, _) in zip(lookups, fetched, strict=True)
            ]
        wanted = [(one.placement, one.wanted) for one in lookups]
        found = cached.rows(
            wanted,
            lambda missing: self._fetch([_TableLookup(place, "", some) for place, some in missing]),
        )
        for (placement, distinct), (_, versions) in zip(wanted, found, strict=True):
            oldest = cached.oldest(placement, distinct, versions)
            self._seen.note_oldest(placement.versioned_name, oldest)
        return [rows for rows, _ in found]

    @contextlib.contextmanager
    def writing(self, name: str) -> Generator[None]:
        """Drops cached rows of a variable that is written in a `with` block, also if that fails."""
        try:
            yield
        finally:
            if self.cached is not None:
                self.cached.drop(name)

    @contextlib.contextmanager
    def pushing(self, rows: Mapping[str, tuple[Any, np.ndarray]]) -> Generator[None]:
        """Notes that gradients of rows, by variable name, are sent in a `with` block."""
        try:
            yield
        finally:
            if self.cached is not None:
                for name, (ids, _) in rows.items():
                    self.cached.note_pushed(name, ids)

    def note_lifetime(self, server: int, lifetime: int) -> None:
        """Drops cached rows if a server restarted: `lifetime` is the number of its run."""
        if self.cached is not None:
            self.cached.note_lifetime(server, lifetime)

    def begin_step(self) -> None:
        """Begins a step of this thread, the unit of the age of cached rows."""
        if self.cached is not None:
            self.cached.begin_step()

    def drop_cached(self) -> None:
        """Drops all cached rows, after a write by another process or discarded gradients."""
        if self.cached is not None:
            self.cached.clear()

    def take_counts(self) -> dict[str, int]:
        """Returns the cache's new "hits" and "misses"; see `CachedRows.take_counts`."""
        return {} if self.cached is None else self.cached.take_counts()

    def _fetch(self, lookups: Sequence[_TableLookup]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns the rows of the distinct ids of each lookup, and the version of each."""
        rows: list[list[np.ndarray]] = [[] for _ in lookups]
        versions = [np.empty(len(one.wanted.ids), np.int64) for one in lookups]
        for request in _requests(lookups):
            answers = self._ask(request.parts.messages("pull_rows"), request.variables)
            arrays = {server: iter(answer.arrays) for server, answer in answers.items()}
            for number, server, part in request.held:
                rows[number].append(next(arrays[server]))
                versions[number][part] = answers[server].fields["version"]
        return [
            (_joined(own, one), version)
            for own, one, version in zip(rows, lookups, versions, strict=True)
        ]


class _TableLookup(NamedTuple):
    """Distinct ids of one table or slot."""

    placement: ShardLayout
    slot: str
    wanted: DistinctRows


class _StepRequest:
    """Rows of several tables, to request with one message to each server.

    `held` has the number of the lookup, the server and the slice of each of its arrays, in order.
    """

    def __init__(self) -> None:
        self.parts = RequestParts()
        self.held: list[tuple[int, int, slice]] = []
        self.answer_bytes = 0
        self._names: dict[int, list[str]] = defaultdict(list)

    def add(self, number: int, lookup: _TableLookup) -> None:
        """Adds a lookup; servers without any of its rows are not asked."""
        placement, slot, wanted = lookup
        for shard, part, numbers in wanted.held(placement):
            if len(numbers):
                server = placement.servers[shard]
                self.parts.add(server, shard_name(placement, shard) + slot, numbers)
                self.held.append((number, server, part))
                self._names[server].append(placement.versioned_name)

    def variables(self, server: int) -> Sequence[str]:
        """Returns the names of the variables whose rows a server sends."""
        return self._names.get(server, ())


def _requests(lookups: Sequence[_TableLookup]) -> list[_StepRequest]:
    """Returns one request for all lookups, or more if answers would be too large."""
    requests: list[_StepRequest] = []
    for number, lookup in enumerate(lookups):
        placement, _, wanted = lookup
        row_bytes = math.prod(placement.shape[1:]) * np.dtype(placement.dtype).itemsize
        answer_bytes = len(wanted.ids) * row_bytes
        if not requests or requests[-1].answer_bytes + answer_bytes > _MOST_ANSWER_BYTES:
            requests.append(_StepRequest())
        requests[-1].add(number, lookup)
        requests[-1].answer_bytes += answer_bytes
    return [one for one in requests if one.held]


def _joined(rows: Sequence[np.ndarray], lookup: _TableLookup) -> np.ndarray:
    placement = lookup.placement
    if not rows:
        return np.empty((0, *placement.shape[1:]), placement.dtype)
    joined = rows[0] if len(rows) == 1 else np.concatenate(rows)
    if isinstance(placement, KeyLayout) and not lookup.slot:
        return placement.row_format.expanded(joined)
    return joined
