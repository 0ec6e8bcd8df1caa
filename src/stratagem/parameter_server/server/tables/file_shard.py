"""Shards of keyed tables with files of rows: opening, columns, and loading of saved rows."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np

from stratagem.parameter_server.server.shards import SavedPart, ShardSpec
from stratagem.parameter_server.server.tables.disk_rows import DiskRows, FetchedRows, Position
from stratagem.parameter_server.server.tables.keyed_shard import KeyedShard
from stratagem.parameter_server.server.updates import Slot

_VALUE = "value"
_NONE = np.empty(0, np.int64)


class FileShard(KeyedShard):
    """Rows by key with files on disk: one column for the value and each optimizer slot.

    Args:
        spec: the shard, with the option `tiers`.
        position: end of the journal that the shard is restored from; None for a new shard.

    Raises:
        OSError: the folder cannot be used.
    """

    def __init__(self, spec: ShardSpec, position: Position | None = None) -> None:
        super().__init__(spec)
        assert self.options.tiers is not None
        name = hashlib.sha256(spec.name.encode()).hexdigest()[:16]
        self._folder = Path(self.options.tiers.folder, f"{name}-{spec.first_row}")
        self._column_names: dict[str | None, str] = {None: _VALUE}
        self._position: Position = (0, 0) if position is None else position
        self._damaged = _NONE
        self._opened = None if position is not None else DiskRows(self._folder)

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
