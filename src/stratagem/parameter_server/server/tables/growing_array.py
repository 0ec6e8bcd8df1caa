"""Arrays that grow without copies: memory is reserved once, and used page by page."""

from __future__ import annotations

import contextlib
import math
import os

import numpy as np

from stratagem.messages import explain

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
