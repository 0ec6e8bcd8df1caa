"""Slots of a keyed table: which key each has, its updates, and those that are free."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import secrets
from collections.abc import Generator, Iterator

import numpy as np

from stratagem.errors import explain
from stratagem.parameter_server.server.tables.row_formats import seeded
from stratagem.parameter_server.server.tables.table_options import (
    LeastFrequent,
    LeastRecent,
    NotSeenFor,
    victims,
)

# Changed rows since the last journal entry, at a cost that depends on the changes alone.


# Arrays that grow without copies: memory is reserved once, and used page by page.

_LEAST_ROWS = 16
# Smaller arrays are copied when they grow, because a page of memory may have 2 MiB.
_COPIED_BYTES = 2**22
_LARGEST_SLOT = 2**31 - 1


class GrowingArray:
    """Array with a first axis that grows to at most `most_rows`. New rows are not initialized.

    `array` has more rows than were asked for, and is another array after `grow`.
    """

    def __init__(self, row_shape: tuple[int, ...], dtype: np.dtype | type, most_rows: int) -> None:
        self._most_rows = most_rows
        self.array = np.empty((0, *row_shape), dtype)
        self.row_bytes = math.prod(row_shape) * self.array.itemsize

    def grow(self, num_rows: int) -> None:
        """Makes `num_rows` rows available.

        Raises:
            MemoryError: they do not fit in memory.
        """
        if num_rows <= len(self.array):
            return
        if num_rows > self._most_rows:
            raise _too_large(num_rows, self._most_rows)
        size = max(_LEAST_ROWS, 2 * len(self.array), num_rows)
        sizes = [min(size, self._most_rows)]
        if size * self.row_bytes > _COPIED_BYTES:
            sizes = [self._most_rows, *sizes]
        for size in sizes:  # the operating system may refuse to reserve more than is used
            with contextlib.suppress(MemoryError):
                grown = np.empty((size, *self.array.shape[1:]), self.array.dtype)
                grown[: len(self.array)] = self.array
                self.array = grown
                return
        raise _too_large(num_rows, len(self.array))


def most_rows_in_memory(row_bytes: int) -> int:
    """Returns the number of rows that fill the memory of this machine."""
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(_LARGEST_SLOT, memory_bytes // max(1, row_bytes))


def _too_large(num_rows: int, most_rows: int) -> MemoryError:
    return MemoryError(
        explain(
            f"A table needs memory for {num_rows} rows.",
            expected=f"at most {most_rows} rows, which fill the memory of this machine.",
            fix="set max_rows and an eviction policy, or use more servers.",
        )
    )


# Fewer than one of so many rows are sorted.
_SORTED_PART = 16


class DirtyRows:
    """Set of row numbers: a list of the marked ones, and a flag for each row.

    Marking, counting and taking cost nothing for unmarked rows.
    """

    def __init__(self, most_rows: int) -> None:
        self._flags = GrowingArray((), np.bool_, most_rows)
        self._num_flags = 0
        self._parts: list[np.ndarray] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def rows(self) -> np.ndarray:
        """The marked rows, in any order."""
        return np.concatenate([np.empty(0, np.int64), *self._parts])

    @property
    def row_bytes(self) -> int:
        """Memory of a row."""
        return self._flags.row_bytes

    def grow(self, num_rows: int) -> None:
        """Adds unmarked rows, up to `num_rows`."""
        self._flags.grow(num_rows)
        self._flags.array[self._num_flags : num_rows] = False
        self._num_flags = max(num_rows, self._num_flags)

    def mark(self, rows: np.ndarray) -> None:
        """Adds distinct rows."""
        new = rows[~self._flags.array[rows]]
        if len(new):
            self._flags.array[new] = True
            self._parts.append(new.astype(np.int32))
            self._count += len(new)

    def has(self, rows: np.ndarray) -> np.ndarray:
        """Returns True for each marked row."""
        return self._flags.array[rows]

    def unmark(self, rows: np.ndarray) -> None:
        """Removes marked rows, at a cost that depends on all marked ones."""
        self._flags.array[rows] = False
        left = self.rows.astype(np.int32)
        self._parts[:] = [left[self._flags.array[left]]]
        self._count = len(self._parts[0])

    def take(self) -> np.ndarray:
        """Returns the marked rows in order, and unmarks them."""
        flags = self._flags.array[: self._num_flags]
        if self._count * _SORTED_PART > len(flags):  # a look at each row is faster than sorting
            rows = np.flatnonzero(flags)
            flags[:] = False
        else:
            parts = [np.empty(0, np.int32), *self._parts]
            rows = np.sort(np.concatenate(parts)).astype(np.int64)
            flags[rows] = False
        self._parts.clear()
        self._count = 0
        return rows


# Hash index from 64-bit keys to slots, for many keys per call.
#
# Open addressing in buckets of eight places, each with a 7-bit tag of the key's hash. The tags of a
# bucket are one 64-bit word, so that a few operations on words compare a key with eight places. A
# place has the slot of its key, and the keys are stored by slot: a match of tags is then checked.
#
# The index grows by linear hashing: buckets form segments, and one segment at a time is split in
# two.
# A call therefore moves few keys beside its own, whatever the size of the index.
#
# Source: Litwin, Linear hashing (1980); Abseil's Swiss tables, for tags in words.

_BUCKET_BITS = 10
_BUCKETS = 1 << _BUCKET_BITS  # buckets of a segment
_PLACES = 8 * _BUCKETS
# Segments are split while a segment that was not yet split in this round has a share of full places
# between these: the splits are spread over the growth, and each segment has room.
_FIRST_SPLIT, _LAST_SPLIT = 0.6, 0.8
_MOST_SPLITS = 64  # segments split at once
_MOST_ROUNDS = 16 * _BUCKETS  # of a search, in a segment without an empty place
# After so many removed tags, a segment is cleaned of them, in turn.
_MOST_REMOVED = _PLACES // 8
_CHUNK = 1 << 14  # keys per pass: temporary arrays stay in the processor's cache

_EMPTY, _REMOVED = 0x80, 0xFE  # tags without a key; others are below 128
_ONE, _SEVEN = np.uint64(1), np.uint64(7)
_ONES = np.uint64(0x0101010101010101)
_HIGH = np.uint64(0x8080808080808080)
_SECOND_BIT = np.uint64(6)  # of a tag, moved to its highest bit
_BYTE_SHIFT = np.uint64(3)


class KeyIndex:
    """Slots by key. Slots are chosen by the caller: each key has one below `most_slots`.

    `keys` has the key of each slot. Callers serialize calls; keys of a call are distinct, except in
    `find`. With a random `seed`, keys cannot be chosen so that they collide.
    """

    def __init__(self, most_slots: int, seed: int | None = None) -> None:
        self._seed = secrets.randbits(63) if seed is None else seed
        most_segments = 4 + math.ceil(2 * most_slots / (_FIRST_SPLIT * _PLACES))
        self._keys = GrowingArray((), np.int64, most_slots)
        self._tags = GrowingArray((_PLACES,), np.uint8, most_segments)
        self._slots = GrowingArray((_PLACES,), np.int32, most_segments)
        self.clear()

    def __len__(self) -> int:
        return self._num_keys

    @property
    def keys(self) -> np.ndarray:
        """Keys by slot; undefined for slots without a key."""
        return self._keys.array

    @property
    def size_bytes(self) -> int:
        """Memory of the buckets, without `keys`."""
        return self._num_segments * (self._tags.row_bytes + self._slots.row_bytes)

    def clear(self) -> None:
        """Removes all keys."""
        self._num_keys = self._num_removed = self._cleaned = 0
        # Segments before this round, which are split in order, and segments now.
        self._round, self._num_segments = 1, 0
        self._add_segments(1)

    def grow(self, num_slots: int) -> None:
        """Makes slots below `num_slots` available."""
        self._keys.grow(num_slots)

    def find(self, keys: np.ndarray) -> np.ndarray:
        """Returns the int64 slot of each int64 key; -1 for an unknown key."""
        slots = np.empty(len(keys), np.int64)
        for first in range(0, len(keys), _CHUNK):
            slots[first : first + _CHUNK] = self._found(keys[first : first + _CHUNK])[0]
        return slots

    def insert(self, keys: np.ndarray, slots: np.ndarray) -> None:
        """Adds unknown keys at unused slots."""
        self.keys[slots] = keys
        for first in range(0, len(keys), _CHUNK):
            part = keys[first : first + _CHUNK]
            self._split_for(self._num_keys + len(part))
            buckets, tags = self._home(part)
            self._put(buckets, tags.astype(np.uint8), slots[first : first + _CHUNK])
            self._num_keys += len(part)

    def remove(self, slots: np.ndarray) -> None:
        """Removes the keys of slots."""
        for first in range(0, len(slots), _CHUNK):
            self._remove(slots[first : first + _CHUNK])

    def _remove(self, slots: np.ndarray) -> None:
        places = self._found(self.keys[slots])[1]
        # A search stops at an empty place: only in a bucket that has one, another may be empty.
        has_empty = _empty(self._words[places >> 3]) != 0
        tags = self._tags.array.reshape(-1)
        tags[places] = np.where(has_empty, _EMPTY, _REMOVED)
        self._num_keys -= len(slots)
        self._num_removed += len(slots) - int(np.count_nonzero(has_empty))
        while self._num_removed > _MOST_REMOVED:
            self._num_removed -= _MOST_REMOVED
            self._cleaned = (self._cleaned + 1) % self._num_segments
            self._place_again(self._cleaned, self._cleaned + 1)

    @property
    def _words(self) -> np.ndarray:
        return self._tags.array.reshape(-1).view(np.uint64)

    def _home(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the first bucket of each key, and its tag as uint64."""
        hashes = seeded(keys, self._seed)
        buckets = hashes & np.uint64(2 * self._round - 1)
        buckets -= np.uint64(self._round) * (buckets >= np.uint64(self._num_segments))
        buckets <<= np.uint64(_BUCKET_BITS)
        buckets |= (hashes >> np.uint64(32)) & np.uint64(_BUCKETS - 1)
        return buckets.view(np.int64), (hashes >> np.uint64(42)) & np.uint64(127)

    def _found(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the slot and the place of each key; slot -1 for an unknown key."""
        stored, of_place, words = self.keys, self._slots.array.reshape(-1), self._words
        buckets, tags = self._home(keys)
        tags *= _ONES
        held = np.take(words, buckets)
        matches = _equal(held, tags)
        slots, places = np.full(len(keys), -1, np.int64), np.zeros(len(keys), np.int64)
        rest: np.ndarray | slice = slice(None)  # of keys: those still searched
        wanted = keys
        num_rounds = 0
        while len(buckets) and num_rounds < _MOST_ROUNDS:
            num_rounds += 1
            at = (buckets << 3) + _first_byte(matches)
            is_match = matches != 0
            at *= is_match
            slot = np.take(of_place, at).astype(np.int64)
            slot *= is_match
            is_found = is_match & (_taken(stored, slot) == wanted)
            if is_found.all():
                slots[rest], places[rest] = slot, at
                break
            numbers = np.arange(len(keys)) if isinstance(rest, slice) else rest
            slots[numbers[is_found]] = slot[is_found]
            places[numbers[is_found]] = at[is_found]
            matches &= matches - _ONE
            # Without another match, an empty place ends the search.
            left = ~is_found & ((matches != 0) | (_empty(held) == 0))
            rest, wanted, buckets = numbers[left], wanted[left], buckets[left]
            tags, held, matches = tags[left], held[left], matches[left]
            is_next = matches == 0
            buckets = np.where(is_next, _next_bucket(buckets), buckets)
            held = np.where(is_next, np.take(words, buckets), held)
            matches = np.where(is_next, _equal(held, tags), matches)
        return slots, places

    def _put(self, buckets: np.ndarray, tags: np.ndarray, slots: np.ndarray) -> None:
        """Writes slots to free places. If several want one place, one wins and others try again.

        Keys of a bucket begin to look for a free place at different bytes, so that few collide.
        """
        words, of_place = self._words, self._slots.array.reshape(-1)
        all_tags = self._tags.array.reshape(-1)
        slots = slots.astype(np.int32)
        starts = slots.astype(np.uint64) & _SEVEN
        num_rounds = 0
        while len(buckets):
            if num_rounds == _MOST_ROUNDS:  # not with a random seed
                raise ValueError("a segment of an index of keys is full")
            num_rounds += 1
            free = np.take(words, buckets) & _HIGH
            shifts = starts << _BYTE_SHIFT
            turned = (free >> shifts) | (free << ((np.uint64(64) - shifts) & np.uint64(63)))
            at = (buckets << 3) + ((_first_byte(turned) + starts.astype(np.int64)) & 7)
            is_free = free != 0
            candidates = at[is_free]
            of_place[candidates] = slots[is_free]
            has_won = is_free.copy()
            has_won[is_free] = of_place[candidates] == slots[is_free]
            all_tags[at[has_won]] = tags[has_won]
            buckets = np.where(is_free, buckets, _next_bucket(buckets))[~has_won]
            tags, slots, starts = tags[~has_won], slots[~has_won], starts[~has_won]

    def _split_for(self, num_keys: int) -> None:
        """Splits segments until there is room for `num_keys`."""
        while True:
            share = num_keys / (self._round * _PLACES)
            progress = (share - _FIRST_SPLIT) / (_LAST_SPLIT - _FIRST_SPLIT)
            wanted = min(self._round, math.ceil(self._round * progress))
            num_split = self._num_segments - self._round
            if wanted <= num_split:
                return
            end = min(wanted, num_split + _MOST_SPLITS)
            self._add_segments(end - num_split)
            if end == self._round:
                self._round *= 2
            self._place_again(num_split, end)

    def _add_segments(self, count: int) -> None:
        first = self._num_segments
        self._tags.grow(first + count)
        self._slots.grow(first + count)
        self._tags.array[first : first + count] = _EMPTY
        self._num_segments += count

    def _place_again(self, begin: int, end: int) -> None:
        """Takes the keys out of segments, and puts each into its present segment."""
        part = slice(begin, end)
        slots = self._slots.array[part][self._tags.array[part] < _EMPTY]
        self._tags.array[part] = _EMPTY
        for first in range(0, len(slots), _CHUNK):
            own = slots[first : first + _CHUNK]
            buckets, tags = self._home(self.keys[own])
            self._put(buckets, tags.astype(np.uint8), own)


def _taken(array: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Returns elements; zeros of an array that has none yet."""
    return np.take(array, places) if len(array) else np.zeros(len(places), array.dtype)


def _equal(words: np.ndarray, tags: np.ndarray) -> np.ndarray:
    """Returns words with the highest bit set in each byte equal to that of `tags`.

    A byte above an equal one may be set by mistake: keys are compared afterwards.
    """
    different = words ^ tags
    return (different - _ONES) & ~different & _HIGH


def _empty(words: np.ndarray) -> np.ndarray:
    """Returns words with the highest bit set in each byte that is `_EMPTY`, not `_REMOVED`."""
    return words & ~(words << _SECOND_BIT) & _HIGH


def _first_byte(words: np.ndarray) -> np.ndarray:
    """Returns the number of the lowest byte with its highest bit set; undefined without one."""
    below = (words & (~words + _ONE)) - _ONE
    return (np.bitwise_count(below) >> 3).astype(np.int64) & 7


def _next_bucket(buckets: np.ndarray) -> np.ndarray:
    """Returns the next buckets, within their segments."""
    return (buckets & ~(_BUCKETS - 1)) | ((buckets + 1) & (_BUCKETS - 1))


# Eviction looks at so many slots at once, and evicts this part of them beforehand.
_WINDOW, _EVICTED_PART = 2**16, 64
_WINDOW_PER_VICTIM = 16
# A row is looked at for its age so often while it ages, in windows of at least this size.
_LOOKS, _LEAST_LOOKED_AT = 8, 2**12


@dataclasses.dataclass(frozen=True)
class SavedKeys:
    """Slots in a journal.

    Args:
        slots: slots in use, of shape (k,).
        keys: the key of each.
        seen: version of the last update of each.
        counts: number of updates of each.
        freed: slots that are no longer in use.
    """

    slots: np.ndarray
    keys: np.ndarray
    seen: np.ndarray
    counts: np.ndarray
    freed: np.ndarray

    @property
    def arrays(self) -> list[np.ndarray]:
        """All arrays, for a message."""
        return [self.slots, self.keys, self.seen, self.counts, self.freed]

    def chosen(self, which: np.ndarray) -> SavedKeys:
        """Returns the slots in use that an index array or a mask chooses, and no freed ones."""
        seen, counts = self.seen[which], self.counts[which]
        return SavedKeys(self.slots[which], self.keys[which], seen, counts, self.freed[:0])

    @classmethod
    def from_arrays(cls, arrays: Iterator[np.ndarray]) -> SavedKeys:
        """Takes the result of `arrays` from a message."""
        return cls(*(next(arrays) for _ in dataclasses.fields(cls)))


@dataclasses.dataclass(frozen=True)
class SlotOrder:
    """Choice of the next slots: for new rows, and for evictions.

    Args:
        num_slots: number of slots, in use or free.
        hand: next slot that eviction looks at.
        swept: version of the last look at ages.
        free: free slots; the last is taken first.
    """

    num_slots: int
    hand: int
    swept: int | None
    free: np.ndarray


class KeySlots:
    """Slots by key, with the number and the last version of each slot's updates.

    Callers serialize calls. `dirty` has the slots that changed since the last journal entry.
    """

    def __init__(self, most_rows: int, dirty: DirtyRows | None = None) -> None:
        self.index = KeyIndex(most_rows)
        self.dirty = DirtyRows(most_rows) if dirty is None else dirty
        self._most_rows = most_rows
        self.num_slots = 0
        self._seen = GrowingArray((), np.uint32, most_rows)
        self._counts = GrowingArray((), np.uint32, most_rows)
        self._is_used = GrowingArray((), np.bool_, most_rows)
        self._free = GrowingArray((), np.int32, most_rows)
        self._num_free = 0
        self._hand = 0  # next slot that eviction looks at
        self._swept: int | None = None  # version of the last look at ages

    def __len__(self) -> int:
        return self.num_slots - self._num_free

    @property
    def size_bytes(self) -> int:
        """Memory in use."""
        arrays = (self._seen, self._counts, self._is_used, self.dirty)
        slot_bytes = self.index.keys.itemsize + sum(one.row_bytes for one in arrays)
        free_bytes = self._num_free * self._free.row_bytes
        return self.num_slots * slot_bytes + free_bytes + self.index.size_bytes

    @property
    def counts(self) -> np.ndarray:
        """Number of updates by slot."""
        return self._counts.array

    @property
    def seen(self) -> np.ndarray:
        """Version of the last update by slot."""
        return self._seen.array

    @property
    def used(self) -> np.ndarray:
        """Slots in use, in order."""
        return np.flatnonzero(self._is_used.array[: self.num_slots])

    def find(self, keys: np.ndarray) -> np.ndarray:
        """Returns the slot of each key; -1 for an unknown key."""
        return self.index.find(keys)

    def add(self, keys: np.ndarray) -> np.ndarray:
        """Returns new slots of distinct unknown keys."""
        num_old = min(len(keys), self._num_free)
        old = self._free.array[self._num_free - num_old : self._num_free][::-1]
        end = self.num_slots + len(keys) - num_old
        self.grow(end)
        slots = np.concatenate([old, np.arange(self.num_slots, end)])
        self._num_free -= num_old
        self.num_slots = end
        self.index.insert(keys, slots)
        self._is_used.array[slots] = True
        self.counts[slots] = self.seen[slots] = 0
        self.mark(slots)
        return slots

    def remove(self, slots: np.ndarray, version: int) -> None:
        """Removes the keys of slots, and makes the slots free, in the update of a version."""
        self.index.remove(slots)
        self.seen[slots] = version
        self._is_used.array[slots] = False
        self._free.grow(self._num_free + len(slots))
        self._free.array[self._num_free : self._num_free + len(slots)] = slots
        self._num_free += len(slots)
        self.mark(slots)

    def note(self, slots: np.ndarray, version: int, num_updates: int = 1) -> None:
        """Records updates of distinct slots."""
        self.counts[slots] += np.uint32(num_updates)
        self.seen[slots] = version
        self.mark(slots)

    def mark(self, slots: np.ndarray) -> None:
        """Marks distinct slots as changed, for the journal."""
        self.dirty.mark(slots)

    def changed(self, version: int) -> np.ndarray:
        """Returns the slots that were updated or freed after a version, in order."""
        return np.flatnonzero(self.seen[: self.num_slots] > version)

    @property
    def free(self) -> np.ndarray:
        """Slots that are not in use, in any order."""
        return self._free.array[: self._num_free].copy()

    @contextlib.contextmanager
    def held(self, slots: np.ndarray) -> Generator[None]:
        """Keeps slots from being chosen by `chosen` and `aged`."""
        self._is_used.array[slots] = False
        try:
            yield
        finally:
            self._is_used.array[slots] = True

    def chosen(self, eviction: LeastFrequent | LeastRecent, num_needed: int) -> np.ndarray:
        """Returns slots to free: at least `num_needed`, if so many are in use.

        They are the first of a window of slots. With more slots than a window, they are therefore
        among the first few percent, and not the first of all. More than needed are chosen, so that
        most updates choose none.
        """
        parts: list[np.ndarray] = []
        window = max(_WINDOW, _WINDOW_PER_VICTIM * num_needed)
        num_wanted = max(num_needed, min(window, len(self)) // _EVICTED_PART)
        for slots in self._windows(window):
            state = self.counts[slots], self.seen[slots], self._is_used.array[slots]
            found = slots[victims(eviction, *state, num_wanted)]
            self._is_used.array[found] = False  # windows overlap
            parts.append(found)
            num_needed -= len(found)
            num_wanted -= len(found)
            if num_needed <= 0:
                break
        chosen = np.concatenate(parts) if parts else np.empty(0, np.int64)
        self._is_used.array[chosen] = True
        return chosen

    def aged(self, eviction: NotSeenFor, version: int) -> np.ndarray:
        """Returns some slots whose last update was too long ago: all of them after a few calls."""
        elapsed = 1 if self._swept is None else max(1, version - self._swept)
        self._swept = version
        window = max(_LEAST_LOOKED_AT, -(-_LOOKS * self.num_slots * elapsed // eviction.steps))
        slots = next(self._windows(window), np.empty(0, np.int64))
        is_old = version - self.seen[slots].astype(np.int64) >= eviction.steps
        return slots[is_old & self._is_used.array[slots]]

    def saved(self, slots: np.ndarray) -> SavedKeys:
        """Returns copies of slots for a journal."""
        is_used = self._is_used.array[slots]
        used = slots[is_used]
        keys = self.index.keys[used]
        return SavedKeys(used, keys, self.seen[used], self.counts[used], slots[~is_used])

    def restore(self, saved: SavedKeys) -> None:
        """Restores slots from a journal. Call `restored` after the last call.

        Raises:
            MemoryError: a slot is too large.
            ValueError: a slot is negative.
        """
        if min(saved.slots.min(initial=0), saved.freed.min(initial=0)) < 0:
            raise ValueError("a slot of a keyed table is negative")
        end = int(saved.slots.max()) + 1 if len(saved.slots) else 0
        if end > self.num_slots:
            self._grow_free(end)
            self.num_slots = end
        self.index.keys[saved.slots] = saved.keys
        self.seen[saved.slots], self.counts[saved.slots] = saved.seen, saved.counts
        self._is_used.array[saved.slots] = True
        self._is_used.array[saved.freed[saved.freed < self.num_slots]] = False

    def restored(self) -> None:
        """Builds the index and the list of free slots.

        Raises:
            ValueError: two slots have the same key.
        """
        slots = self.used
        keys = self.index.keys[slots]
        self.index.clear()
        self.index.insert(keys, slots)
        if (self.find(keys) != slots).any():
            raise ValueError("two slots of a keyed table have the same key")
        free = np.flatnonzero(~self._is_used.array[: self.num_slots])[::-1]
        self._free.grow(len(free))
        self._free.array[: len(free)] = free
        self._num_free = len(free)

    def grow(self, num_slots: int) -> None:
        """Makes memory for slots below `num_slots` available, or raises MemoryError."""
        self.index.grow(num_slots)
        for one in (self._seen, self._counts, self._is_used, self.dirty):
            one.grow(num_slots)

    def order(self) -> SlotOrder:
        """Returns what decides on the next new slots and on the next evictions."""
        return SlotOrder(self.num_slots, self._hand, self._swept, self.free)

    def set_order(self, order: SlotOrder) -> None:
        """Restores the result of `order`. Call after `restored`.

        Raises:
            ValueError: these are not the free slots.
        """
        free = np.sort(order.free)
        self._grow_free(order.num_slots)
        own = np.flatnonzero(~self._is_used.array[: order.num_slots])
        if order.num_slots < self.num_slots or not np.array_equal(free, own):
            raise ValueError("the free slots of a keyed table are others")
        self.num_slots, self._num_free = order.num_slots, len(free)
        self._hand, self._swept = order.hand, order.swept
        self._free.grow(len(free))
        self._free.array[: len(free)] = order.free

    def grow_over(self, num_slots: int, *, marks: bool = True) -> None:
        """Marks all slots, those below `num_slots` too, so that a journal frees the latter.

        Without `marks`, others may mark them.
        """
        end = max(num_slots, self.num_slots)
        self._grow_free(end)
        if marks:
            self.mark(np.arange(end))

    def _grow_free(self, end: int) -> None:
        """Makes slots below `end` available, and the new ones free."""
        self.grow(end)
        self._is_used.array[self.num_slots : end] = False
        self.seen[self.num_slots : end] = 0

    def _windows(self, size: int) -> Generator[np.ndarray]:
        """Yields all slots in windows, each of the hand and the next slots."""
        if size >= self.num_slots:
            if self.num_slots:
                yield np.arange(self.num_slots)
            return
        for _ in range(-(-self.num_slots // size)):
            first, self._hand = self._hand, (self._hand + size) % self.num_slots
            yield np.arange(first, first + size) % self.num_slots
