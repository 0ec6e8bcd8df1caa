"""Rows of a keyed table and their optimizer slots in memory, as arrays that grow."""

from __future__ import annotations

import numpy as np

from stratagem.messages import explain
from stratagem.parameter_server.server.shards import Shard, ShardSpec
from stratagem.parameter_server.server.tables.growing_array import GrowingArray, most_rows_in_memory
from stratagem.parameter_server.server.tables.row_formats import RowFormat
from stratagem.parameter_server.server.tables.table_options import TableOptions

# Memory of the key of a row, its place in the index and its counts.
_KEY_BYTES = 28


class RowArrays(Shard):
    """Arrays of a keyed table: `value`, whose rows have the `format` of the table, and `slots`.

    They have more rows than are in use. `options` are those of the table, and `initials` the
    initial values of the optimizer slots.

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

    def require(self, rows: np.ndarray) -> None:
        """Raises TypeError if these are not keys."""
        if rows.dtype != np.int64 or rows.ndim != 1:
            raise TypeError(
                explain(
                    f"Keys of {self.spec.name!r} have dtype {rows.dtype} and {rows.ndim} axes.",
                    expected="int64 keys with a single axis.",
                    fix="run the same Stratagem version in all processes.",
                )
            )

    def copied(self, value: np.ndarray) -> np.ndarray:
        """Returns a whole value, which has no rows: rows are read by key only."""
        is_value = value.dtype == self.format.stored_dtype
        return np.empty(self.spec.shape, self.spec.dtype if is_value else value.dtype)

    def dtype_of(self, slot: str | None) -> np.dtype:
        """Returns the dtype in which updates compute the value, or a slot."""
        return np.dtype(self.spec.dtype) if slot is None else self.array(slot).dtype

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

    @property
    def row_bytes(self) -> int:
        """Memory of a row and its slots."""
        arrays = [self._value, *list(self._slot_arrays.values())]
        return max(1, sum(one.row_bytes for one in arrays))

    @property
    def _num_places(self) -> int:
        """Number of places in use."""
        raise NotImplementedError

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
