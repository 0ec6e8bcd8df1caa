"""Slots of a keyed table: which key each has, its updates, and those that are free."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Generator, Iterator

import numpy as np

from stratagem.parameter_server.server.tables.dirty_rows import DirtyRows
from stratagem.parameter_server.server.tables.growing_array import GrowingArray
from stratagem.parameter_server.server.tables.key_index import KeyIndex
from stratagem.parameter_server.server.tables.policies import (
    LeastFrequent,
    LeastRecent,
    NotSeenFor,
    victims,
)

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

    Callers serialize calls. `dirty` has the slots that changed since the last journal entry, and
    `unsaved` those since the last saved table; None if none was saved. `removed` collects the keys
    that are removed, if it is a list.
    """

    def __init__(self, most_rows: int, dirty: DirtyRows | None = None) -> None:
        self.index = KeyIndex(most_rows)
        self.dirty = DirtyRows(most_rows) if dirty is None else dirty
        self.unsaved: DirtyRows | None = None
        self.removed: list[np.ndarray] | None = None
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

    def remove(self, slots: np.ndarray) -> None:
        """Removes the keys of slots, and makes the slots free."""
        if self.removed is not None:
            self.removed.append(self.index.keys[slots])
        self.index.remove(slots)
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

    def set(self, slots: np.ndarray, keys: SavedKeys) -> None:
        """Sets the numbers of updates and the last versions of distinct slots."""
        self.counts[slots], self.seen[slots] = keys.counts, keys.seen
        self.mark(slots)

    def mark(self, slots: np.ndarray) -> None:
        """Marks distinct slots as changed, for the journal and for saved tables."""
        self.dirty.mark(slots)
        if self.unsaved is not None:
            self.unsaved.mark(slots)

    def track(self) -> DirtyRows:
        """Returns the slots that changed since the last saved table, from the first call on."""
        if self.unsaved is None:
            self.unsaved = DirtyRows(self._most_rows)
            self.unsaved.grow(self.num_slots)
        return self.unsaved

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
            self.grow(end)
            self._is_used.array[self.num_slots : end] = False
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
        if self.unsaved is not None:
            self.unsaved.grow(num_slots)

    def order(self) -> SlotOrder:
        """Returns what decides on the next new slots and on the next evictions."""
        free = self._free.array[: self._num_free].copy()
        return SlotOrder(self.num_slots, self._hand, self._swept, free)

    def set_order(self, order: SlotOrder) -> None:
        """Restores the result of `order`. Call after `restored`.

        Raises:
            ValueError: these are not the free slots.
        """
        free = np.sort(order.free)
        self.grow(order.num_slots)
        self._is_used.array[self.num_slots : order.num_slots] = False
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
        self.grow(end)
        self._is_used.array[self.num_slots : end] = False
        if marks:
            self.mark(np.arange(end))

    def _windows(self, size: int) -> Generator[np.ndarray]:
        """Yields all slots in windows, each of the hand and the next slots."""
        if size >= self.num_slots:
            if self.num_slots:
                yield np.arange(self.num_slots)
            return
        for _ in range(-(-self.num_slots // size)):
            first, self._hand = self._hand, (self._hand + size) % self.num_slots
            yield np.arange(first, first + size) % self.num_slots
