"""Rows of tables in a worker's memory, at most a few steps old."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

import numpy as np

from stratagem.parameter_server.client.distinct_rows import DistinctRows
from stratagem.parameter_server.client.row_cache import RowCache
from stratagem.parameter_server.client.shard_layout import ShardLayout

__all__ = ["CachedRows", "CachedTable"]

# Places in which a row may be: few enough to compare all at once.
_WAYS = 8
_NO_ID = -1
_NEVER = -(2**62)
# Knuth's multiplicative hash: consecutive ids go to different sets.
_HASH = np.uint64(0x9E3779B97F4A7C15)
_HASH_SHIFT = np.uint64(32)

# Returns rows of distinct ids from the servers, and the version of each.
Fetch = Callable[[DistinctRows], tuple[np.ndarray, np.ndarray]]


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
        self._num_invalidations = 0
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

    def rows(
        self, placement: ShardLayout, wanted: DistinctRows, fetch: Fetch
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the rows of distinct ids, and the version of each, as `fetch` does."""
        step = getattr(self._local, "step", self._num_steps)
        with self._lock:
            begun = self._num_invalidations
            table = self._table(placement)
            slots = table.find(wanted.ids, step - self._options.max_age_steps, step)
            is_hit = slots >= 0
            num_hits = int(np.count_nonzero(is_hit))
            rows, versions = table.take(slots) if num_hits else (None, None)
            self._counts["hits"] += num_hits
            self._counts["misses"] += len(slots) - num_hits
        if rows is None or versions is None:
            fetched, fetched_versions = fetch(wanted)
            self._keep(placement, wanted.ids, fetched, fetched_versions, step, begun)
            return fetched, fetched_versions
        if num_hits == len(slots):
            return rows, versions
        missing = wanted.subset(~is_hit)
        fetched, fetched_versions = fetch(missing)
        if not self._keep(placement, missing.ids, fetched, fetched_versions, step, begun):
            return fetch(wanted)
        rows[~is_hit], versions[~is_hit] = fetched, fetched_versions
        return rows, versions

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
            self._num_invalidations += 1
            if ids is None:
                del self._tables[name]
            else:
                self._tables[name][1].drop(np.asarray(ids).reshape(-1))

    def clear(self) -> None:
        """Drops the rows of all tables."""
        with self._lock:
            self._drop_all()

    def _drop_all(self) -> None:
        self._num_invalidations += 1
        self._tables.clear()

    def _table(self, placement: ShardLayout) -> CachedTable:
        known, table = self._tables.get(placement.name, (None, None))
        if table is None or known != placement:
            max_rows = min(self._options.max_rows, placement.shape[0])
            table = CachedTable(max_rows, placement.shape[1:], np.dtype(placement.dtype))
            self._tables[placement.name] = placement, table
        return table

    def _keep(
        self,
        placement: ShardLayout,
        ids: np.ndarray,
        rows: np.ndarray,
        versions: np.ndarray,
        step: int,
        begun: int,
    ) -> bool:
        """Stores fetched rows; returns False if the cache was invalidated since `begun`."""
        with self._lock:
            if self._num_invalidations != begun:
                return False
            self._table(placement).put(ids, rows, versions, step)
            return True


class CachedTable:
    """Set-associative cache of at most `max_rows` rows with nonnegative ids.

    A set replaces its least recently used row. It is an array of ids, because searching all sets
    of a lookup at once is many times faster in NumPy than a dictionary.
    """

    def __init__(self, max_rows: int, row_shape: tuple[int, ...], dtype: np.dtype) -> None:
        self._ways = max(1, min(_WAYS, max_rows))
        self._num_sets = max(1, max_rows // self._ways)
        count = self._num_sets * self._ways
        self._ids = np.full(count, _NO_ID, np.int64)
        self._read = np.full(count, _NEVER, np.int64)  # step that read the row
        self._used = np.full(count, _NEVER, np.int64)  # last step that used the row
        self._versions = np.zeros(count, np.int64)
        self._rows = np.empty((count, *row_shape), dtype)

    @property
    def size_bytes(self) -> int:
        """Size in bytes."""
        arrays = (self._ids, self._read, self._used, self._versions, self._rows)
        return sum(array.nbytes for array in arrays)

    def find(self, ids: np.ndarray, oldest: int, step: int) -> np.ndarray:
        """Returns the slot of each of distinct ids, or -1; marks found rows as used in `step`.

        Rows that were read before the step `oldest` are not found.
        """
        slots = self._slots(ids)
        known = np.flatnonzero(slots >= 0)
        is_old = self._read[slots[known]] < max(oldest, _NEVER + 1)
        slots[known[is_old]] = -1
        self._used[slots[known[~is_old]]] = step
        return slots

    def take(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns copies of the rows in slots, and their versions; any values for slot -1."""
        return (
            np.take(self._rows, slots, axis=0, mode="clip"),
            np.take(self._versions, slots, mode="clip"),
        )

    def put(self, ids: np.ndarray, rows: np.ndarray, versions: np.ndarray, step: int) -> None:
        """Stores rows of distinct ids that `step` read, as far as there is room.

        A row that the step used is not replaced.
        """
        slots = self._slots(ids)
        is_known = slots >= 0
        self._store(slots[is_known], ids, rows, versions, np.flatnonzero(is_known), step)
        rest = np.flatnonzero(~is_known)
        owner = np.empty(len(self._ids), np.int32)
        while len(rest):
            begins = self._sets(ids[rest]) * self._ways
            used = self._used[begins[:, None] + np.arange(self._ways)]
            ways = used.argmin(axis=1)
            has_room = used[np.arange(len(rest)), ways] < step
            rest, targets = rest[has_room], (begins + ways)[has_room]
            # One new row of each set at a time: the last of several writes wins.
            owner[targets] = np.arange(len(rest), dtype=np.int32)
            is_winner = owner[targets] == np.arange(len(rest))
            self._store(targets[is_winner], ids, rows, versions, rest[is_winner], step)
            rest = rest[~is_winner]

    def drop(self, ids: np.ndarray) -> None:
        """Drops rows; `ids` may repeat."""
        slots = self._slots(ids)
        slots = slots[slots >= 0]
        self._ids[slots] = _NO_ID
        self._used[slots] = _NEVER

    def _store(
        self,
        slots: np.ndarray,
        ids: np.ndarray,
        rows: np.ndarray,
        versions: np.ndarray,
        chosen: np.ndarray,
        step: int,
    ) -> None:
        self._ids[slots] = ids[chosen]
        self._read[slots] = self._used[slots] = step
        self._versions[slots] = versions[chosen]
        self._rows[slots] = rows[chosen]

    def _sets(self, ids: np.ndarray) -> np.ndarray:
        hashed = (ids.astype(np.uint64) * _HASH) >> _HASH_SHIFT
        return (hashed % np.uint64(self._num_sets)).astype(np.intp)

    def _slots(self, ids: np.ndarray) -> np.ndarray:
        """Returns the slot of each id, or -1."""
        begins = self._sets(ids) * self._ways
        held = np.take(self._ids.reshape(-1, self._ways), begins // self._ways, axis=0)
        found = np.flatnonzero(held == ids[:, None])
        places, ways = np.divmod(found, self._ways)
        slots = np.full(len(ids), -1, np.intp)
        slots[places] = begins[places] + ways
        return slots
