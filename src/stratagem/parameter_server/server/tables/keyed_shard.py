"""Shards of tables whose rows are found by key, made by updates and evicted by policies.

Rows have slot numbers, which never leave the server. Everything else of a shard works on slots:
optimizers, changed rows and the journal.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Self

import numpy as np

from stratagem.parameter_server.server.shards import (
    SavedPart,
    Shard,
    ShardSpec,
    Slot,
    UpdatedPart,
    padded_empty,
    piece_rows,
)
from stratagem.parameter_server.server.tables.key_slots import (
    DirtyRows,
    GrowingArray,
    SavedKeys,
    most_rows_in_memory,
)
from stratagem.parameter_server.server.tables.keyed_rows import COUNTERS, KeyedRows, Sighting
from stratagem.parameter_server.server.tables.row_formats import RowFormat
from stratagem.parameter_server.server.tables.table_options import TableOptions

# Memory of the key of a row, its place in the index and its counts.
_KEY_BYTES = 28

# Saves that a table remembers: a delta of another one has all rows.
_MOST_SAVES = 1024


@dataclasses.dataclass(frozen=True)
class KeyedMarks:
    """Changed slots of a table: of its rows, and of the keys that have no row yet."""

    rows: np.ndarray
    candidates: np.ndarray


# Rows of a keyed table in one update.


class KeyedPart(UpdatedPart):
    """Known rows and initial values of new ones, which one optimizer updates."""

    def __init__(
        self,
        shard: KeyedShard,
        optimizer: str,
        sighting: Sighting,
        grads: np.ndarray,
        version: int,
    ) -> None:
        self._table, self._sighting, self._version = shard, sighting, version
        if sighting.order is not None:
            grads = grads[sighting.order]
        super().__init__(shard, optimizer, sighting.slots, grads)
        self.num_refused = len(sighting.refused)

    def keep(self, value: np.ndarray, slots: Mapping[str, np.ndarray]) -> None:
        """Stores the new rows in the shard."""
        count = len(self._sighting)
        stored = {self._names[name]: np.asarray(slot)[:count] for name, slot in slots.items()}
        self._table.keep(self._sighting, self._version, np.asarray(value)[:count], stored)

    def _taken(self, slot: str | None) -> Any:
        sighting, table = self._sighting, self._table
        # Updates compute the value in the dtype of the table, however it is stored.
        dtype = np.dtype(table.spec.dtype) if slot is None else table.array(slot).dtype
        rows = padded_empty(len(sighting), table.spec.shape[1:], dtype)
        num_known = len(sighting.slots)
        if num_known:
            table.take(slot, sighting.slots, rows)
        if len(sighting.new):
            rows[num_known : len(sighting)] = table.initial_rows(slot, sighting)
        return rows


@dataclasses.dataclass(frozen=True)
class SavedTable:
    """Keys of rows in a journal.

    Args:
        rows: slots of the rows.
        candidates: slots of the keys that have no row yet.
        counters: counters of the table.
        initials: initial values of the optimizer slots, by name.
        disk: rows on disk that belong to the journal; None without tiers.
    """

    rows: SavedKeys
    candidates: SavedKeys
    counters: Mapping[str, int]
    initials: Mapping[str, float]
    disk: Mapping[str, Any] | None = None


class KeyedShard(Shard):
    """Rows by key, and their slots of optimizers.

    The arrays are `value`, whose rows have the `format` of the table, and `slots`. They grow, and
    have more rows than are in use. `options` are those of the table, and `initials` the initial
    values of the optimizer slots. `keyed` are the keys, and `saves` the last version in each of its
    saves, by identity: rows that changed since have a later one, or none.

    Raises:
        ValueError: the spec has invalid options.
    """

    def __init__(self, spec: ShardSpec) -> None:
        self.options = options = TableOptions.from_fields(spec.table or {})
        self.format = RowFormat.of(spec.shape[1:], spec.dtype, spec.table or {})
        row_bytes = self.format.stored_bytes
        self._most_rows = most_rows_in_memory(_KEY_BYTES + (0 if options.tiers else row_bytes))
        # Places of rows in memory. Without tiers, the place of a row is its slot.
        self._most_places = min(self._most_rows, most_rows_in_memory(_KEY_BYTES + row_bytes))
        stored = self.format
        self._value = GrowingArray(stored.stored_shape, stored.stored_dtype, self._most_places)
        super().__init__(spec, self._value.array)
        self._slot_arrays: dict[str, GrowingArray] = {}
        self.initials: dict[str, float] = {}
        self.keyed = KeyedRows(self.options, self._most_rows, self._row_states())
        self._rows, self._candidates = self.keyed.rows, self.keyed.candidates
        self._is_changed = True  # what is no slot: counters, and the spec of a new table
        self.saves: dict[str, int] = {}

    def require(self, rows: np.ndarray) -> None:
        """Raises TypeError if these are not keys."""
        if rows.dtype != np.int64 or rows.ndim != 1:
            raise TypeError(f"keys of {self.spec.name!r} are no int64 vector but {rows.dtype}")

    def copied(self, value: np.ndarray) -> np.ndarray:
        """Returns a whole value, which has no rows: rows are read by key only."""
        is_value = value.dtype == self.format.stored_dtype
        return np.empty(self.spec.shape, self.spec.dtype if is_value else value.dtype)

    def expanded(self, slot: str | None, pulled: np.ndarray) -> np.ndarray:
        """Returns the result of `pulled` as updates compute with it."""
        return self.format.expanded(pulled) if slot is None else pulled

    def take(self, slot: str | None, slots: np.ndarray, out: np.ndarray) -> None:
        """Copies rows, as updates compute with them, to the beginning of `out`."""
        if slot is None and not self.format.is_plain:
            out[: len(slots)] = self.format.expanded(np.take(self.value, slots, axis=0))
        else:
            np.take(self.array(slot), slots, axis=0, out=out[: len(slots)], mode="clip")

    def drop_slot(self, name: str) -> None:
        """Removes a slot of an optimizer."""
        del self.slots[name], self._slot_arrays[name], self.initials[name]
        self.saves.clear()  # rows that were saved have it

    @property
    def row_bytes(self) -> int:
        """Memory of a row and its slots."""
        arrays = [self._value, *list(self._slot_arrays.values())]
        return max(1, sum(one.row_bytes for one in arrays))

    @property
    def size_bytes(self) -> int:
        """Memory of all rows, keys and slots in use, in bytes."""
        rows_bytes = self._rows.num_slots * self.row_bytes
        return rows_bytes + self._rows.size_bytes + self._candidates.size_bytes

    @property
    def marked_bytes(self) -> int:
        """Size of the rows that a journal entry would copy, in bytes."""
        return len(self._rows.dirty) * self.size_bytes // max(1, self._rows.num_slots)

    def emptied(self) -> Self:
        """Returns a table with the same options and optimizer slots, without rows."""
        empty = self._without_rows()
        for name, array in self._slot_arrays.items():
            empty._add_slot_array(name, array.array.dtype, self.initials[name])
        return empty

    def load(self, part: SavedPart) -> None:
        """Puts saved rows into an empty table. Call `restored` and `loaded` after the last part."""
        self.restore(part)

    def loaded(self, num_rows: int, num_candidates: int) -> None:
        """Completes a load. A journal frees the slots of the former table, which had so many."""
        self._rows.grow_over(num_rows)
        self._candidates.grow_over(num_candidates)

    def copied_slots(self, slots: np.ndarray) -> SavedPart:
        """Returns copies of the rows of slots in use."""
        with self.lock:
            return self._saved(slots, np.empty(0, np.int64))

    def described(self) -> dict[str, int]:
        """Returns the counters and sizes of the table."""
        with self.lock:
            num_rows = len(self._rows)
            sizes = {"rows": num_rows, "hot": num_rows, "bytes": self.size_bytes}
            return {**sizes, "candidates": len(self._candidates), **self.keyed.counters}

    def pulled(self, slot: str | None, rows: np.ndarray) -> np.ndarray:
        """Returns the rows of keys as they are stored: see `expanded`.

        An unknown key has its initial value, and gets no row.
        """
        with self.lock:
            array = self.array(slot)
            slots = self._rows.find(rows)
            is_known = slots >= 0
            if is_known.all():
                return np.take(array, slots, axis=0)
            pulled = np.empty((len(rows), *array.shape[1:]), array.dtype)
            pulled[is_known] = array[slots[is_known]]
        pulled[~is_known] = self._initial(slot, rows[~is_known], array.dtype)
        return pulled

    def updated(
        self, optimizer: str, rows: np.ndarray | None, grads: np.ndarray | None, version: int
    ) -> UpdatedPart:
        """Returns the rows of an update, without making any. `version` is that of the update.

        Raises:
            ValueError: the update is of the whole table, or has a new key twice.
        """
        if rows is None or grads is None:
            raise ValueError(f"a gradient of the whole of {self.spec.name!r} was pushed")
        sighting = self.keyed.sighting(rows, version)
        self._require_distinct(np.concatenate([sighting.new, sighting.refused]))
        self._hold(sighting.slots)
        self._reserve(len(sighting.new))
        return KeyedPart(self, optimizer, sighting, grads, version)

    def add_slot(self, name: str, slot: Slot) -> None:
        """Adds a slot of an optimizer."""
        self._add_slot_array(name, np.dtype(slot.dtype), slot.initial)
        self.mark()

    def mark(self, rows: np.ndarray | None = None) -> None:
        """Marks slots as changed; None marks all."""
        self._is_changed = True
        self._rows.mark(self._rows.used if rows is None else rows)

    def take_marks(self) -> KeyedMarks | None:
        """Returns and clears the marks; None if nothing changed."""
        if not (self._is_changed or len(self._rows.dirty) or len(self._candidates.dirty)):
            return None
        self._is_changed = False
        return KeyedMarks(self._rows.dirty.take(), self._candidates.dirty.take())

    def put_back(self, marks: KeyedMarks) -> None:
        """Undoes `take_marks`."""
        self._is_changed = True
        self._rows.dirty.mark(marks.rows)
        self._candidates.dirty.mark(marks.candidates)

    def saved(self, marks: KeyedMarks | None = None) -> SavedPart:
        """Returns copies of the marked slots."""
        assert marks is not None
        with self.lock:
            return self._saved(marks.rows, marks.candidates)

    def pieces(self, marks: KeyedMarks | None = None) -> Iterator[SavedPart]:
        """Yields copies of slots, all or the marked ones, in pieces of about 4 MiB."""
        none = np.empty(0, np.int64)
        count = piece_rows(self.row_bytes + _KEY_BYTES, 1)
        rows = self._rows_to_save() if marks is None else marks.rows
        candidates = np.arange(self._candidates.num_slots) if marks is None else marks.candidates
        for first in range(0, len(rows), count):
            with self.lock:
                part = self._saved(rows[first : first + count], none)
            yield part
        with self.lock:  # also of a table without rows
            part = self._saved(none, candidates)
        yield part

    def changed(self, version: int) -> KeyedMarks:
        """Returns the slots that updates after a version of the server have changed."""
        last = version + self.keyed.version_offset
        return KeyedMarks(self._rows.changed(last), self._candidates.changed(last))

    def note_save(self, save: str, version: int) -> None:
        """Records that the table was saved, or is as it was saved."""
        self.saves[save] = version + self.keyed.version_offset
        if len(self.saves) > _MOST_SAVES:
            del self.saves[next(iter(self.saves))]

    def _rows_to_save(self) -> np.ndarray:
        """Returns the slots that a rewritten journal has."""
        return np.arange(self._rows.num_slots)

    def restore(self, part: SavedPart) -> None:
        """Restores slots from a journal. Call `restored` after the last part."""
        saved = self._with_keys_of(part)
        places = self._new_places(saved.rows.slots)
        self.value[places] = part.value
        for name in self.slots:
            self.slots[name][places] = part.slots.get(name, self.initials[name])

    def _with_keys_of(self, part: SavedPart) -> SavedTable:
        """Restores keys, counters and missing slots of optimizers, and returns the keys."""
        saved = part.table
        assert isinstance(saved, SavedTable)
        self._is_changed = True
        self._rows.restore(saved.rows)
        self._candidates.restore(saved.candidates)
        self.keyed.counters.update({name: int(saved.counters[name]) for name in COUNTERS})
        self.keyed.version_offset = int(saved.counters.get("version_offset", 0))
        for name, rows in part.slots.items():
            if name not in self.slots:
                self._add_slot_array(name, rows.dtype, float(saved.initials[name]))
        self._grow(self._rows.num_slots)
        return saved

    def restored(self) -> None:
        """Completes a restoration. Raises ValueError if a key has two rows."""
        self._rows.restored()
        self._candidates.restored()

    def initial_rows(self, slot: str | None, sighting: Sighting) -> np.ndarray:
        """Returns the initial rows of new keys, as updates compute with them."""
        return self.expanded(slot, self._initial(slot, sighting.new, self.array(slot).dtype))

    def keep(
        self,
        sighting: Sighting,
        version: int,
        value: np.ndarray,
        slots: Mapping[str, np.ndarray],
    ) -> None:
        """Stores the rows of an update and makes new ones, after it succeeded."""
        value = self._rounded(sighting, value)
        with self.lock:
            rows = self.keyed.keep(sighting, version)
            self._is_changed |= bool(len(sighting.refused))
            made = self._new_places(rows[len(sighting.slots) :])
            if len(made):  # slots of other optimizers too
                for name in self.slots.keys() - slots.keys():
                    self.slots[name][made] = self.initials[name]
            places = self._places(rows)
            self.value[places] = value
            for name, slot in slots.items():
                self.slots[name][places] = slot
            self.keyed.evict_aged(version)

    def _rounded(self, sighting: Sighting, value: np.ndarray) -> np.ndarray:
        """Returns the new rows of an update as they are stored."""
        if self.format.is_plain:
            return value
        keys = np.concatenate([self._rows.index.keys[sighting.slots], sighting.new])
        counts = np.ones(len(keys), np.uint64)
        counts[: len(sighting.slots)] += self._rows.counts[sighting.slots]
        return self.format.stored(value, keys, counts)

    @property
    def _num_places(self) -> int:
        return self._rows.num_slots

    def _initial(self, slot: str | None, keys: np.ndarray, dtype: np.dtype) -> np.ndarray:
        """Returns initial rows as they are stored."""
        if slot is not None:
            return np.full((len(keys), *self.spec.shape[1:]), self.initials[slot], dtype)
        return self.options.initializer.stored(keys, self.format)

    def _add_slot_array(self, name: str, dtype: np.dtype, initial: float) -> None:
        made = GrowingArray(self.spec.shape[1:], dtype, self._most_places)
        made.grow(self._num_places)
        made.array[: self._num_places] = initial
        self._slot_arrays[name], self.initials[name] = made, initial
        self.slots[name] = made.array

    def _grow(self, num_slots: int) -> None:
        self._value.grow(num_slots)
        self.value = self._value.array
        for name, array in self._slot_arrays.items():
            array.grow(num_slots)
            self.slots[name] = array.array

    def _without_rows(self) -> Self:
        return type(self)(self.spec)

    def _row_states(self) -> DirtyRows:
        return DirtyRows(self._most_rows)

    def _places(self, slots: np.ndarray) -> np.ndarray:
        """Returns the places of rows in the arrays. Call with the lock."""
        return slots

    def _new_places(self, slots: np.ndarray) -> np.ndarray:
        """Returns the places of new rows, whose values are undefined. Call with the lock."""
        return slots

    def _hold(self, slots: np.ndarray) -> None:
        """Keeps rows in memory until the next call."""

    def _reserve(self, num_new: int) -> None:
        """Makes memory for new rows available, so that a change cannot fail when it is half made.

        Raises:
            MemoryError: there is not enough.
        """
        if num_new:
            end = self._end_of_new(num_new)
            with self.lock:
                self._rows.grow(end)
                self._grow(end)

    def _end_of_new(self, num_new: int) -> int:
        """Returns the end of the slots after new rows: a full table evicts as many."""
        end = self._rows.num_slots
        return min(max(self.keyed.most_rows, end), end + num_new)

    def _saved(self, rows: np.ndarray, candidates: np.ndarray) -> SavedPart:
        keys = self._rows.saved(rows)
        table = SavedTable(
            keys,
            self._candidates.saved(candidates),
            {**self.keyed.counters, "version_offset": self.keyed.version_offset},
            dict(self.initials),
            self._on_disk(),
        )
        places = self._places(keys.slots)
        slots = {name: slot[places] for name, slot in [*self.slots.items()]}
        return SavedPart(self.spec, keys.slots, self.value[places], slots, table)

    def _on_disk(self) -> Mapping[str, Any] | None:
        return None

    def _require_distinct(self, new: np.ndarray) -> None:
        if len(np.unique(new)) < len(new):
            raise ValueError(f"a key of {self.spec.name!r} was given twice in one request")
