"""Changed rows since the last journal entry, at a cost that depends on the changes alone."""

from __future__ import annotations

import contextlib
import math
import os

import numpy as np

from stratagem.errors import explain

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
