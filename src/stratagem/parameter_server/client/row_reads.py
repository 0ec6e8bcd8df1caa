"""Lookups of table rows: each distinct row once, from the cache or from its server.

The lookups of a step are one request to each server, however many tables there are.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from stratagem.group.transport.wire import Message
from stratagem.parameter_server.client.distinct_rows import DistinctIds, DistinctKeys, DistinctRows
from stratagem.parameter_server.client.request_partitioning import RequestParts, shard_name
from stratagem.parameter_server.client.row_cache import RowCache
from stratagem.parameter_server.client.shard_layout import KeyLayout, ShardLayout
from stratagem.parameter_server.server.changes import SeenVersions
from stratagem.parameter_server.server.shards import aligned_empty

# Rows of tables in a worker's memory, at most a few steps old.

# Entries of the index for each cached row: the more, the fewer rows share one.
_INDEX_PER_ROW = 8
# Step of a slot without a row. Ids cannot show that: any 64-bit integer is a key.
_NEVER = np.iinfo(np.int64).min
# Knuth's multiplicative hash, whose upper half is scaled to the index.
_HASH, _HALF = np.uint64(0x9E3779B97F4A7C15), np.uint64(32)

# Distinct ids of a table; and a row for each of several ids, with the version of each distinct one.
Wanted = tuple[ShardLayout, DistinctRows]
Rows = tuple[np.ndarray, np.ndarray]
# Returns rows of distinct ids of several tables from the servers, and the version of each.
Fetch = Callable[[Sequence[Wanted]], list[Rows]]


@dataclasses.dataclass
class _CacheLookup:
    """Lookup in one table: cached slots of its distinct ids, and its result once it is known."""

    placement: ShardLayout
    wanted: DistinctRows
    table: CachedTable
    num_dropped: int
    slots: np.ndarray
    is_hit: np.ndarray
    result: Rows | None = None

    @property
    def missing(self) -> Wanted:
        """The distinct ids that are not cached."""
        is_any_hit = bool(self.is_hit.any())
        return self.placement, self.wanted.subset(~self.is_hit) if is_any_hit else self.wanted


class CachedRows:
    """Cached rows of all tables of a process. Thread-safe.

    Each thread runs its own steps. A lookup during which the cache is invalidated reads all its
    rows from the servers.
    """

    def __init__(self, options: RowCache) -> None:
        self._options = options
        self._tables: dict[str, tuple[ShardLayout, CachedTable]] = {}
        self._lifetimes: dict[int, int] = {}
        self._lock = threading.Lock()
        self._local = threading.local()
        self._num_steps = 0
        self._num_drops: Counter[str] = Counter()
        self._num_clears = 0
        self._counts: Counter[str] = Counter()

    @property
    def size_bytes(self) -> int:
        """Size of all tables' caches in bytes."""
        with self._lock:
            return sum(table.size_bytes for _, table in self._tables.values())

    def take_counts(self) -> dict[str, int]:
        """Returns the numbers of "hits" and "misses" since the last call.

        An id that is repeated in one lookup counts once.
        """
        with self._lock:
            counts, self._counts = self._counts, Counter()
        return dict(counts)

    def begin_step(self) -> None:
        """Begins a step of this thread."""
        self._oldest.clear()
        with self._lock:
            self._num_steps += 1
            self._local.step = self._num_steps

    @property
    def _oldest(self) -> dict[tuple[int, str], tuple[int, int]]:
        """Run and version of the oldest rows of this thread's step, by server and table."""
        if not hasattr(self._local, "oldest"):
            self._local.oldest = {}
        return self._local.oldest

    def rows(self, wanted: Sequence[Wanted], fetch: Fetch) -> list[Rows]:
        """Returns a row for each requested id of each table, and the version of each distinct id.

        `wanted` has each table once. Rows of all tables that are not cached come from one call of
        `fetch`, and from a second one if their cache was invalidated meanwhile.
        """
        step = getattr(self._local, "step", self._num_steps)
        with self._lock:
            lookups = [self._found(*one, step) for one in wanted]
        open_lookups = [one for one in lookups if one.result is None]
        if open_lookups:
            fetched = fetch([one.missing for one in open_lookups])
            with self._lock:
                for one, rows in zip(open_lookups, fetched, strict=True):
                    one.result = self._merged(one, *rows, step)
        again = [one for one in open_lookups if one.result is None]
        if again:
            fetched = fetch([(one.placement, one.wanted) for one in again])
            for one, (rows, versions) in zip(again, fetched, strict=True):
                one.result = one.wanted.expanded(rows), versions
        return [one.result for one in lookups if one.result is not None]

    def _found(self, placement: ShardLayout, wanted: DistinctRows, step: int) -> _CacheLookup:
        """Looks ids up in the cache. Call with the lock."""
        table = self._table(placement)
        slots, is_hit = table.find(wanted.ids, step - self._options.max_age_steps)
        num_hits = int(np.count_nonzero(is_hit))
        self._counts["hits"] += num_hits
        self._counts["misses"] += len(slots) - num_hits
        lookup = _CacheLookup(placement, wanted, table, self._drops(placement.name), slots, is_hit)
        if num_hits == len(slots):
            lookup.result = table.take(slots[wanted.places]), table.versions(slots)
        return lookup

    def _merged(
        self, lookup: _CacheLookup, fetched: np.ndarray, versions: np.ndarray, step: int
    ) -> Rows | None:
        """Stores fetched rows, and returns those of a lookup; None if cached ones are out of date.

        Call with the lock.
        """
        if lookup.num_dropped != self._drops(lookup.placement.name):
            return None
        wanted, is_hit, table = lookup.wanted, lookup.is_hit, lookup.table
        if not is_hit.any():
            table.put(wanted.ids, fetched, versions, step)
            return wanted.expanded(fetched), versions
        if not table.holds(lookup.slots[is_hit], wanted.ids[is_hit]):
            return None
        return table.merged(wanted, lookup.slots, is_hit, fetched, versions, step)

    def _drops(self, name: str) -> int:
        """Returns the number of times that rows of a table were dropped."""
        return self._num_drops[name] + self._num_clears

    def oldest(
        self, placement: ShardLayout, wanted: DistinctRows, versions: np.ndarray
    ) -> dict[int, tuple[int, int]]:
        """Returns the run and version of each server's oldest rows that this step has read."""
        found: dict[int, tuple[int, int]] = {}
        for server, part in zip(placement.servers, wanted.parts, strict=True):
            if part.stop > part.start:
                version = int(versions[part].min())
                key = (server, placement.name)
                run = self._lifetimes[server], version
                self._oldest[key] = found[server] = min(self._oldest.get(key, run), run)
        return found

    def note_lifetime(self, server: int, lifetime: int) -> None:
        """Records the run of a server; drops all rows if it restarted."""
        if self._lifetimes.get(server) == lifetime:
            return
        with self._lock:
            if lifetime > self._lifetimes.setdefault(server, lifetime):
                self._lifetimes[server] = lifetime
                self._drop_all()

    def note_pushed(self, name: str, ids: np.ndarray) -> None:
        """Records that this process sent gradients of rows."""
        if self._options.reads_own_updates:
            self.drop(name, ids)

    def drop(self, name: str, ids: np.ndarray | None = None) -> None:
        """Drops rows of a table; None drops all of them."""
        with self._lock:
            if name not in self._tables:
                return
            self._num_drops[name] += 1
            if ids is None:
                del self._tables[name]
            else:
                self._tables[name][1].drop(np.asarray(ids).reshape(-1))

    def clear(self) -> None:
        """Drops the rows of all tables."""
        with self._lock:
            self._drop_all()

    def _drop_all(self) -> None:
        self._num_clears += 1
        self._tables.clear()

    def _table(self, placement: ShardLayout) -> CachedTable:
        known, table = self._tables.get(placement.name, (None, None))
        if table is None or known != placement:
            max_rows, num_rows = self._options.max_rows, None
            if not placement.is_keyed:
                num_rows = placement.shape[0]
                max_rows = min(max_rows, num_rows)
            row_shape, dtype = placement.shape[1:], np.dtype(placement.dtype)
            table = CachedTable(max_rows, num_rows, row_shape, dtype)
            self._tables[placement.name] = placement, table
        return table


class CachedTable:
    """The last `max_rows` rows that were read from a table.

    The table has `num_rows` rows, or rows for any 64-bit keys if that is None: ids are then keys.

    New rows replace those that were read first, which are also the first to be too old. Each slot
    names its row, so that entries of the index may be out of date.
    """

    def __init__(
        self, max_rows: int, num_rows: int | None, row_shape: tuple[int, ...], dtype: np.dtype
    ) -> None:
        self._ids = np.zeros(max_rows, np.int64)
        self._read = np.full(max_rows, _NEVER)  # step that read the row
        self._versions = np.zeros(max_rows, np.int64)
        self._rows = np.empty((max_rows, *row_shape), dtype)
        self._next = 0
        # Slots by id, or by hash: of two ids with the same hash, the last one is found.
        num_entries = _INDEX_PER_ROW * max_rows
        self._is_hashed = num_rows is None or num_rows > num_entries
        self._index = np.zeros(
            num_entries if num_rows is None else min(num_rows, num_entries), np.int32
        )

    @property
    def size_bytes(self) -> int:
        """Size in bytes."""
        arrays = (self._ids, self._read, self._versions, self._rows, self._index)
        return sum(array.nbytes for array in arrays)

    def find(self, ids: np.ndarray, oldest: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns a slot for each id, and True for those that hold it.

        Rows that were read before the step `oldest` are not found.
        """
        slots = self._index[self._entries(ids)]
        return slots, (self._ids[slots] == ids) & (self._read[slots] >= oldest)

    def holds(self, slots: np.ndarray, ids: np.ndarray) -> bool:
        """Returns True if the slots still hold the rows of these ids."""
        return bool(((self._ids[slots] == ids) & (self._read[slots] != _NEVER)).all())

    def take(self, slots: np.ndarray) -> np.ndarray:
        """Returns a copy of the rows in slots, which may repeat."""
        out = aligned_empty((len(slots), *self._rows.shape[1:]), self._rows.dtype)
        return np.take(self._rows, slots, axis=0, out=out, mode="clip")

    def versions(self, slots: np.ndarray) -> np.ndarray:
        """Returns the versions of the rows in slots."""
        return self._versions[slots]

    def merged(
        self,
        wanted: DistinctRows,
        slots: np.ndarray,
        is_hit: np.ndarray,
        fetched: np.ndarray,
        fetched_versions: np.ndarray,
        step: int,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Stores fetched rows, and returns requested rows and versions, as `CachedRows.rows`."""
        versions = self._versions[slots]
        versions[~is_hit] = fetched_versions
        ids = wanted.ids[~is_hit]
        if self._is_free(len(ids), slots[is_hit]):
            slots[~is_hit] = self._next_slots(len(ids))
            self.put(ids, fetched, fetched_versions, step)
            return self.take(slots[wanted.places]), versions
        rows = np.empty((len(slots), *fetched.shape[1:]), fetched.dtype)
        rows[is_hit] = self._rows[slots[is_hit]]
        rows[~is_hit] = fetched
        self.put(ids, fetched, fetched_versions, step)
        return wanted.expanded(rows), versions

    def put(self, ids: np.ndarray, rows: np.ndarray, versions: np.ndarray, step: int) -> None:
        """Stores rows of distinct ids that `step` read; the first ones if there are too many."""
        slots = self._next_slots(min(len(ids), len(self._ids)))
        count = len(slots)
        self._ids[slots] = ids[:count]
        self._read[slots] = step
        self._versions[slots] = versions[:count]
        self._index[self._entries(ids[:count])] = slots
        until_end = min(count, len(self._ids) - self._next)
        self._rows[self._next : self._next + until_end] = rows[:until_end]
        self._rows[: count - until_end] = rows[until_end:count]
        self._next = (self._next + count) % len(self._ids)

    def drop(self, ids: np.ndarray) -> None:
        """Drops rows; `ids` may repeat."""
        slots = self._index[self._entries(ids)]
        self._read[slots[self._ids[slots] == ids]] = _NEVER

    def _next_slots(self, count: int) -> np.ndarray:
        return (self._next + np.arange(count)) % len(self._ids)

    def _is_free(self, count: int, used: np.ndarray) -> bool:
        """Returns True if the next `count` slots are none of those in use."""
        if count > len(self._ids):
            return False
        distances = (used - self._next) % len(self._ids)
        return int(distances.min()) >= count

    def _entries(self, ids: np.ndarray) -> np.ndarray:
        """Returns the place of each id in the index."""
        if not self._is_hashed:
            return ids
        hashed = (ids.astype(np.uint64) * _HASH) >> _HALF
        return (hashed * np.uint64(len(self._index)) >> _HALF).astype(np.intp)


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
            self._seen.note_oldest(placement.name, oldest)
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
                self._names[server].append(placement.name)

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
