"""Rows of tables in a worker's memory, at most a few steps old."""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from stratagem.parameter_server.client.distinct_rows import DistinctRows
from stratagem.parameter_server.client.row_cache import RowCache
from stratagem.parameter_server.client.shard_layout import ShardLayout
from stratagem.parameter_server.server.rows import aligned_empty

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
