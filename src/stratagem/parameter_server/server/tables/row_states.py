"""Changed rows of a table on disk, until they are in the journal and then in the files of rows."""

from __future__ import annotations

import numpy as np

from stratagem.parameter_server.server.tables.dirty_rows import DirtyRows


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
