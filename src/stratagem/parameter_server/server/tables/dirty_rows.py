"""Changed rows since the last journal entry, at a cost that depends on the changes alone."""

from __future__ import annotations

import numpy as np

from stratagem.parameter_server.server.tables.growing_array import GrowingArray

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
