"""Shards of keyed tables with rows on disk: those beyond a memory limit."""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Self

import numpy as np

from stratagem.parameter_server.server.shards import SavedPart, ShardSpec, Slot
from stratagem.parameter_server.server.tables.disk_rows import DiskRows, FetchedRows, Position
from stratagem.parameter_server.server.tables.key_slots import DirtyRows, GrowingArray
from stratagem.parameter_server.server.tables.keyed_rows import Sighting
from stratagem.parameter_server.server.tables.keyed_shard import KeyedMarks, KeyedShard
from stratagem.resources import Closing

# Changed rows of a table on disk, until they are in the journal and then in the files of rows.


class RowStates(DirtyRows):
    """Rows that changed since the last journal entry, and those that the files of rows lack.

    The latter are in `unflushed`: memory, or a journal entry, has a newer value than the files. A
    marked row is in both sets; `take` leaves it in the second one.
    """

    def __init__(self, most_rows: int) -> None:
        super().__init__(most_rows)
        self.unflushed = DirtyRows(most_rows)

    @property
    def row_bytes(self) -> int:
        """Memory of a row."""
        return super().row_bytes + self.unflushed.row_bytes

    def grow(self, num_rows: int) -> None:
        """Adds unmarked rows, up to `num_rows`."""
        super().grow(num_rows)
        self.unflushed.grow(num_rows)

    def mark(self, rows: np.ndarray) -> None:
        """Adds distinct rows."""
        super().mark(rows)
        self.unflushed.mark(rows)

    def flushable(self) -> np.ndarray:
        """Returns the rows, in any order, whose present value was taken and is not in the files."""
        rows = self.unflushed.rows
        return rows[~self.has(rows)]

    def flushed(self, rows: np.ndarray) -> None:
        """Records that the files have the value of rows, except of those that changed meanwhile."""
        self.unflushed.unmark(rows[~self.has(rows)])


# Places in memory of some rows of a table, those that were used lately.

# Frames are looked at, and freed, at least so many at once, so that most calls free none.
_WINDOW, _FREED_PART = 2**12, 64


class RowFrames:
    """Frames of slots: numbers of rows in arrays in memory. Callers serialize calls.

    `num_frames` have been made, and `num_used` have a row. Frames are freed by CLOCK: the hand
    passes over a frame that was used since its last visit, one that is pinned, and one whose row is
    not clean. `num_drops` grows with each call that frees frames.

    Source: Corbató, A paging experiment with the Multics system (1968).

    Args:
        most_slots: largest number of slots.
        most_frames: largest number of frames.
        are_clean: returns False for each of some slots that must stay in memory.
    """

    def __init__(
        self, most_slots: int, most_frames: int, are_clean: Callable[[np.ndarray], np.ndarray]
    ) -> None:
        self._are_clean = are_clean
        self._frames = GrowingArray((), np.int32, most_slots)
        self._num_slots = 0
        self._slots = GrowingArray((), np.int32, most_frames)
        self._is_recent = GrowingArray((), np.bool_, most_frames)
        self._is_pinned = GrowingArray((), np.bool_, most_frames)
        self._free = GrowingArray((), np.int32, most_frames)
        self._num_free = 0
        self._hand = 0
        self._pinned = np.empty(0, np.int64)
        self.num_frames = self.num_drops = 0

    @property
    def num_used(self) -> int:
        """Number of rows in memory."""
        return self.num_frames - self._num_free

    @property
    def slot_bytes(self) -> int:
        """Memory of a slot."""
        return self._frames.row_bytes

    @property
    def frame_bytes(self) -> int:
        """Memory of a frame."""
        arrays = (self._slots, self._is_recent, self._is_pinned, self._free)
        return sum(one.row_bytes for one in arrays)

    def grow(self, num_slots: int) -> None:
        """Adds slots without a frame, up to `num_slots`."""
        self._frames.grow(num_slots)
        self._frames.array[self._num_slots : num_slots] = -1
        self._num_slots = max(num_slots, self._num_slots)

    def reserve(self, num_new: int) -> None:
        """Makes memory for `num_new` more frames available, or raises MemoryError."""
        for one in (self._slots, self._is_recent, self._is_pinned):
            one.grow(self.num_frames + num_new)

    def find(self, slots: np.ndarray) -> np.ndarray:
        """Returns the frame of each slot; -1 without one."""
        return self._frames.array[slots].astype(np.int64)

    def use(self, frames: np.ndarray) -> None:
        """Records a use of frames."""
        self._is_recent.array[frames] = True

    def pin(self, frames: np.ndarray) -> None:
        """Keeps frames, and no others, from being freed."""
        self._is_pinned.array[self._pinned] = False
        self._is_pinned.array[frames] = True
        self._pinned = frames

    def add(self, slots: np.ndarray) -> np.ndarray:
        """Returns new frames of distinct slots without one."""
        num_old = min(len(slots), self._num_free)
        old = self._free.array[self._num_free - num_old : self._num_free]
        num_new = len(slots) - num_old
        self.reserve(num_new)
        frames = np.concatenate([old, np.arange(self.num_frames, self.num_frames + num_new)])
        self._num_free -= num_old
        self.num_frames += num_new
        self._frames.array[slots] = frames
        self._slots.array[frames] = slots
        self._is_recent.array[frames] = True
        self._is_pinned.array[frames] = False
        return frames

    def make_room(self, count: int, capacity: int, kept: np.ndarray | None = None) -> int:
        """Frees frames, so that `count` more are used within `capacity`; returns how many can be.

        Frames of `kept` are not freed.
        """
        excess = self.num_used + count - capacity
        if excess > 0:
            held = self._pinned
            if kept is not None:
                self.pin(np.concatenate([held, kept]))
            self._free_some(max(excess, capacity // _FREED_PART))
            self.pin(held)
        return max(0, min(count, capacity - self.num_used))

    def _free_some(self, num_wanted: int) -> None:
        window = max(_WINDOW, 2 * num_wanted)
        for _ in range(2 * -(-self.num_frames // window)):  # twice: the first visit may pass over
            end = min(self._hand + window, self.num_frames)
            frames = np.arange(self._hand, end)
            slots = self._slots.array[frames].astype(np.int64)
            is_found = (slots >= 0) & ~self._is_recent.array[frames]
            is_found &= ~self._is_pinned.array[frames]
            is_found[is_found] = self._are_clean(slots[is_found])
            found = np.flatnonzero(is_found)[:num_wanted]
            if len(found) == num_wanted:  # the hand stops after the last one
                end = self._hand + int(found[-1]) + 1
            self._is_recent.array[self._hand : end] = False
            self._hand = 0 if end == self.num_frames else end
            if len(found):
                self._drop(frames[found], slots[found])
            num_wanted -= len(found)
            if not num_wanted:
                return

    def _drop(self, frames: np.ndarray, slots: np.ndarray) -> None:
        self._frames.array[slots] = -1
        self._slots.array[frames] = -1
        self._free.grow(self._num_free + len(frames))
        self._free.array[self._num_free : self._num_free + len(frames)] = frames
        self._num_free += len(frames)
        self.num_drops += 1


_VALUE = "value"  # the column of values; each optimizer slot has one, too
_NO_ROW = np.empty(0, np.int64)
# Rows that are newer than those on disk are written in the background when they fill the first part
# of the memory limit, until they fill the second one. Beyond the third, changes wait for it.
_FLUSHED_ABOVE, _FLUSHED_TO, _MOST_UNFLUSHED = 0.5, 0.375, 0.75
_FLUSHED_AT_ONCE = 2**14
_ATTEMPTS = 4  # to read rows without the lock; then with it


class TieredShard(KeyedShard):
    """Rows by key, some of them in memory: those that were used lately, and changed ones.

    The place of a row in `value` and `slots` is its frame. A row is written to disk only when a
    journal entry on disk has its value, so rows on disk and journal together are the state. A row
    that changed since stays in memory, even beyond the limit: see `is_full`.

    Calls of `take_marks`, `put_back` and `flush` are serialized by their caller. When it calls
    `flush`, all taken marks are in journal entries on disk, or were put back. Then `is_journaled`
    is True if one of these names the files.

    Args:
        spec: the shard, with the option `tiers`.
        position: end of the journal that the shard is restored from; None for a new shard.

    Raises:
        DataLossError: in `restore`, the rows on disk do not fit the journal.
        OSError: the folder cannot be used.
    """

    def __init__(self, spec: ShardSpec, position: Position | None = None) -> None:
        super().__init__(spec)
        self.lock: Any = threading.RLock()
        assert self.options.tiers is not None
        name = hashlib.sha256(spec.name.encode()).hexdigest()[:16]
        self._folder = Path(self.options.tiers.folder, f"{name}-{spec.first_row}")
        self._column_names: dict[str | None, str] = {None: _VALUE}
        self._position: Position = (0, 0) if position is None else position
        self._damaged = _NO_ROW
        self._opened = None if position is not None else DiskRows(self._folder)
        self._memory_bytes = int(self.options.tiers.memory_bytes)
        self._frames = RowFrames(self._most_rows, self._most_places, self._are_clean)
        self._num_hits = 0
        self.is_journaled = False

    @property
    def size_bytes(self) -> int:
        """Memory of the rows in memory, in bytes: a rewritten journal has no others."""
        return self._frames.num_used * self.row_bytes

    @property
    def marked_bytes(self) -> int:
        """Size of the rows that a journal entry would copy, in bytes."""
        return len(self._rows.dirty) * self.row_bytes

    @property
    def capacity(self) -> int:
        """Number of rows that fill the memory limit."""
        return max(1, self._memory_bytes // self.row_bytes)

    @property
    def is_full(self) -> bool:
        """True if changes must wait until the journal and the disk have the last ones."""
        return len(self._states.unflushed) > _MOST_UNFLUSHED * self.capacity

    def described(self) -> dict[str, int]:
        """Returns the counters and sizes of the table, and those of each tier."""
        with self.lock:
            disk = self._disk
            return {
                **super().described(),
                "bytes": self.size_bytes + self._index_bytes,
                "hot": self._frames.num_used,
                "unflushed": len(self._states.unflushed),
                "memory_hits": self._num_hits,
                "disk_reads": disk.num_read,
                "disk_read_bytes": disk.read_bytes,
                "disk_written_bytes": disk.written_bytes,
                "disk_bytes": disk.size_bytes,
            }

    def warm(self, keys: np.ndarray) -> None:
        """Reads the rows of keys into memory, so that an update finds them there."""
        if keys.dtype == np.int64 and keys.ndim == 1:  # others are refused by the update
            with self._located(keys, is_bounded=False):
                pass

    def pulled(self, slot: str | None, rows: np.ndarray) -> np.ndarray:
        """Returns the rows of keys. An unknown key has its initial value, and gets no row."""
        with self._located(rows, is_bounded=True) as (slots, fetched):
            array = self.array(slot)
            known = np.flatnonzero(slots >= 0)
            frames = self._frames.find(slots[known])
            is_hot = frames >= 0
            if len(known) == len(rows) and is_hot.all():
                return np.take(array, frames, axis=0)
            pulled = np.empty((len(rows), *array.shape[1:]), array.dtype)
            pulled[known[is_hot]] = array[frames[is_hot]]
            cold = known[~is_hot]
            if len(cold):
                values = self._column(fetched, slot)
                pulled[cold] = values[np.searchsorted(fetched.slots, slots[cold])]
        is_unknown = slots < 0
        pulled[is_unknown] = self._initial(slot, rows[is_unknown], array.dtype)
        return pulled

    def take(self, slot: str | None, slots: np.ndarray, out: np.ndarray) -> None:
        """Copies rows to the beginning of `out`."""
        with self.lock:
            super().take(slot, self._places(slots), out)

    def mark(self, rows: np.ndarray | None = None) -> None:
        """Marks slots as changed. None marks no row: a row without a value has the initial one."""
        super().mark(_NO_ROW if rows is None else rows)

    def take_marks(self) -> KeyedMarks | None:
        """Returns and clears the marks; None if nothing changed."""
        self.is_journaled = True
        return super().take_marks()

    def put_back(self, marks: KeyedMarks) -> None:
        """Undoes `take_marks`."""
        self.is_journaled = False
        super().put_back(marks)

    def flush(self, position: Position) -> None:
        """Writes rows to disk, if too many are newer there than they are in memory.

        Those that were updated the longest ago are written.

        Args:
            position: that of the last journal entry.

        Raises:
            OSError: the disk is full, or fails. The rows stay in memory.
        """
        capacity = self.capacity
        with self.lock:
            excess = len(self._states.unflushed) - int(_FLUSHED_TO * capacity)
            if len(self._states.unflushed) <= _FLUSHED_ABOVE * capacity:
                return
            slots = self._states.flushable()
            if len(slots) > excess:
                slots = slots[np.argpartition(self._rows.seen[slots], excess - 1)[:excess]]
            slots = np.sort(slots)
        written: list[np.ndarray] = []
        for first in range(0, len(slots), _FLUSHED_AT_ONCE):
            part = slots[first : first + _FLUSHED_AT_ONCE]
            with self.lock:
                part = part[~self._states.has(part)]  # others changed meanwhile
                keys = self._rows.saved(part)
                places = self._frames.find(keys.slots)
                columns = {
                    column: self.array(name)[places] for name, column in self._column_names.items()
                }
            self._disk.write(position, keys, columns)
            written.append(part)
        if written:
            self._disk.sync()
            with self.lock:
                self._states.flushed(np.concatenate(written))

    def _rows_to_save(self) -> np.ndarray:
        """Returns the slots that the disk does not have."""
        with self.lock:
            return np.sort(self._states.unflushed.rows)

    def restore(self, part: SavedPart) -> None:
        """Restores slots from a journal. Call `restored` after the last part."""
        saved = part.table
        if self._opened is None:
            self._open(saved.disk["id"])
        for name, column in saved.disk["columns"].items():
            if self._column_names.get(name, column) != column:  # dropped, and added again
                self.drop_slot(name)
            self._column_names[name] = column
        super().restore(part)
        slots = np.concatenate([saved.rows.slots, saved.rows.freed])
        slots = slots[slots < self._rows.num_slots]
        self._states.unflushed.mark(slots)
        self._damaged = np.setdiff1d(self._damaged, slots)
        self.flush(self._position)

    def restored(self) -> None:
        """Completes a restoration.

        Raises:
            ValueError: a key has two rows.
            DataLossError: keys on disk are damaged.
        """
        if len(self._damaged):
            raise self._disk.lost(f"{len(self._damaged)} of its keys are damaged")
        super().restored()

    def keep(
        self,
        sighting: Sighting,
        version: int,
        value: np.ndarray,
        slots: Mapping[str, np.ndarray],
    ) -> None:
        """Stores the rows of an update and makes new ones, after it succeeded."""
        with self.lock:
            super().keep(sighting, version, value, slots)
            self._frames.pin(_NO_ROW)

    def add_slot(self, name: str, slot: Slot) -> None:
        """Adds a slot of an optimizer. Rows on disk have its initial value until they change."""
        with self.lock:
            super().add_slot(name, slot)

    def drop_slot(self, name: str) -> None:
        """Removes a slot of an optimizer."""
        with self.lock:
            super().drop_slot(name)
            del self._column_names[name]
            self._is_changed = True

    def load(self, part: SavedPart) -> None:
        """Writes saved rows to the files of a table that `emptied` returned, and not to memory.

        They count from the first journal entry that names these files, so no entry has them.
        """
        keys = self._with_keys_of(part).rows
        order = np.argsort(keys.slots)
        columns = {_VALUE: part.value[order]}
        for name, array in self._slot_arrays.items():
            values = part.slots.get(name)
            if values is None:
                shape = (len(order), *array.array.shape[1:])
                values = np.full(shape, self.initials[name], array.array.dtype)
            columns[self._column_names[name]] = values[order]
        self._disk.write((0, 0), keys.chosen(order), columns)

    def loaded(self, num_rows: int, num_candidates: int) -> None:
        """Completes a load: all rows are on disk. Marks of the former table may be put back."""
        self._disk.sync()
        self._rows.grow_over(num_rows, marks=False)
        self._candidates.grow_over(num_candidates)

    def close(self) -> None:
        """Closes the files of rows."""
        if self._opened is not None:
            self._opened.close()

    def remove(self) -> None:
        """Closes and removes the files of rows."""
        if self._opened is not None:
            self._opened.remove()

    def discard(self) -> None:
        """Removes the files of rows, which another table replaced, while threads may read them."""
        self._disk.discard()

    @property
    def _disk(self) -> DiskRows:
        assert self._opened is not None
        return self._opened

    def _on_disk(self) -> Mapping[str, Any]:
        names = {name: one for name, one in self._column_names.items() if name is not None}
        return {"id": self._disk.rows_id, "columns": names}

    def _without_rows(self) -> Self:
        empty = type(self)(self.spec, self._position)
        empty._opened = self._disk.emptied()
        return empty

    def _add_slot_array(self, name: str, dtype: np.dtype, initial: float) -> None:
        self._column_names.setdefault(name, f"{name}#{secrets.token_hex(4)}")
        super()._add_slot_array(name, dtype, initial)

    def _open(self, rows_id: str) -> None:
        """Opens the rows on disk, and restores their keys."""
        self._opened = DiskRows(self._folder, rows_id)
        if self._opened.position > self._position:
            raise self._opened.lost("the journal ends before the last entry whose rows it has")
        for keys, damaged in self._opened.scan():
            self._rows.restore(keys)
            self._damaged = np.concatenate([self._damaged, damaged])
        self._grow(self._rows.num_slots)

    def _column(self, fetched: FetchedRows, slot: str | None) -> np.ndarray:
        array = self.array(slot)
        initial = 0 if slot is None else self.initials[slot]
        values = np.full((len(fetched.slots), *array.shape[1:]), initial, array.dtype)
        fetched.fill(self._column_names[slot], values)
        return values

    @property
    def _num_places(self) -> int:
        return self._frames.num_frames

    @property
    def _index_bytes(self) -> int:
        """Memory of keys and frames."""
        frames_bytes = self._frames.num_used * self._frames.frame_bytes
        frames_bytes += self._rows.num_slots * self._frames.slot_bytes
        return frames_bytes + self._rows.size_bytes + self._candidates.size_bytes

    def _row_states(self) -> DirtyRows:
        self._states = RowStates(self._most_rows)
        return self._states

    def _are_clean(self, slots: np.ndarray) -> np.ndarray:
        return ~self._states.unflushed.has(slots)

    def _places(self, slots: np.ndarray) -> np.ndarray:
        frames = self._frames.find(slots)
        is_cold = frames < 0
        if is_cold.any():
            fetched = self._disk.read(np.unique(slots[is_cold]))
            self._admit(fetched, frames[~is_cold], is_bounded=False)
            frames = self._frames.find(slots)
        self._frames.use(frames)
        return frames

    def _new_places(self, slots: np.ndarray) -> np.ndarray:
        frames = self._frames.find(slots)
        is_new = frames < 0
        new = slots[is_new]
        self._frames.make_room(len(new), self.capacity, frames[~is_new])
        frames[is_new] = self._frames.add(new)
        super()._grow(self._frames.num_frames)
        return frames

    def _hold(self, slots: np.ndarray) -> None:
        with self.lock:
            self._frames.pin(_NO_ROW)
            self._frames.pin(self._places(slots))

    def _reserve(self, num_new: int) -> None:
        if num_new:
            end = self._end_of_new(num_new)
            with self.lock:
                self._rows.grow(end)
                self._grow(end)
                num_frames = self._frames.num_frames
                num_new = min(num_new, self._most_rows - num_frames)  # a slot has one at most
                self._frames.reserve(num_new)
                super()._grow(num_frames + num_new)

    def _grow(self, num_slots: int) -> None:
        self._frames.grow(num_slots)

    @contextlib.contextmanager
    def _located(
        self, keys: np.ndarray, *, is_bounded: bool
    ) -> Generator[tuple[np.ndarray, FetchedRows]]:
        """Yields, with the lock, the slot of each key, and rows that are not in memory.

        The disk is read without the lock. If rows were dropped from memory meanwhile, the next
        attempt begins. Without `is_bounded`, memory beyond the limit is used for the rows.
        """
        for attempt in range(_ATTEMPTS):
            is_last = attempt == _ATTEMPTS - 1
            with self.lock if is_last else contextlib.nullcontext():
                with self.lock:
                    slots = self._rows.find(keys)
                    known = slots[slots >= 0]
                    frames = self._frames.find(known)
                    is_cold = frames < 0
                    cold, hot = np.unique(known[is_cold]), frames[~is_cold]
                    self._frames.use(hot)
                    self._num_hits += 0 if attempt else len(hot)
                    num_drops = self._frames.num_drops
                    if not len(cold):
                        yield slots, FetchedRows(cold, [])
                        return
                fetched = self._disk.read(cold)
                with self.lock:
                    if self._frames.num_drops == num_drops:
                        self._admit(fetched, hot, is_bounded=is_bounded)
                        yield self._rows.find(keys), fetched
                        return

    def _admit(self, fetched: FetchedRows, kept: np.ndarray, *, is_bounded: bool) -> None:
        """Puts fetched rows into memory, if no other thread did, and none was dropped since.

        Raises:
            DataLossError: a row is damaged.
        """
        is_cold = self._frames.find(fetched.slots) < 0
        if not fetched.are_valid()[is_cold].all():
            raise self._disk.lost("a row is damaged")
        cold = np.flatnonzero(is_cold)
        room = self._frames.make_room(len(cold), self.capacity, kept)
        if is_bounded:
            cold = cold[:room]
        places = self._frames.add(fetched.slots[cold])
        super()._grow(self._frames.num_frames)
        for name in self._column_names:
            self.array(name)[places] = self._column(fetched, name)[cold]


# Tables of a server with rows on disk: reads before changes, and writes after journal entries.


class Tiers(Closing):
    """Tables whose rows beyond a memory limit are on disk.

    `position` is that of the last journal entry on disk. `save` writes all changes to the journal
    and then rows to disk, so that memory can be used for others; a `StateJournal` sets it. Without
    a journal, rows are written to disk alone.

    Args:
        changing: context that blocks changes.
    """

    def __init__(self, changing: Callable[[], AbstractContextManager[Any]]) -> None:
        self._changing = changing
        self._shards: dict[str, TieredShard] = {}
        self._retired: list[TieredShard] = []
        self._saving = threading.Lock()
        self.position: Position = (0, 0)
        self.save: Callable[[], Any] = self._save_without_journal

    @property
    def has_tables(self) -> bool:
        """True if requests may wait for the disk."""
        return bool(self._shards)

    def add(self, shard: TieredShard) -> None:
        """Adds a table."""
        self._shards[shard.spec.name] = shard

    def replace(self, table: TieredShard) -> None:
        """Replaces a table by a loaded one. Call within `changing`.

        The files of the former one are removed when a journal entry names those of the loaded one.
        """
        self._retired.append(self._shards[table.spec.name])
        self.add(table)
        if self.save == self._save_without_journal:
            self._discard_retired(is_any=True)

    def warm(self, rows: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> None:
        """Reads the rows of an update into memory, before the update blocks others.

        Waits for the disk if too many rows changed since they were written.
        """
        for name in rows.keys() & self._shards.keys():
            if self._shards[name].is_full:
                with contextlib.suppress(OSError):  # reported by the server; memory grows
                    self.save()
            self._shards[name].warm(rows[name][0])

    def flush(self, position: Position) -> None:
        """Records a journal entry on disk, and writes rows to disk if that makes room.

        Raises:
            OSError: the disk is full, or fails.
        """
        self.position = position
        for shard in [*self._shards.values()]:
            shard.flush(position)
        self._discard_retired()

    def close(self, *, removes: bool = False) -> None:
        """Closes all files, and removes them if no later run uses them."""
        for shard in self._shards.values():
            if removes:
                shard.remove()
            else:
                shard.close()

    def _discard_retired(self, *, is_any: bool = False) -> None:
        for old in [*self._retired]:
            if is_any or self._shards[old.spec.name].is_journaled:
                old.discard()
                self._retired.remove(old)

    def _save_without_journal(self) -> None:
        with self._saving:
            for shard in [*self._shards.values()]:
                with self._changing():
                    shard.take_marks()
            self.flush(self.position)
