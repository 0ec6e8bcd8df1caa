"""Changed rows of a table on disk, until they are in the journal and then in the files of rows."""

from __future__ import annotations

import numpy as np

from stratagem.parameter_server.server.tables.dirty_rows import DirtyRows

__all__ = ["RowStates"]


class RowStates(DirtyRows):
    """Rows that changed since the last journal entry, and three sets that follow from them.

    A marked row is *dirty*. `take` moves it to `in_flight`, those of an entry that is being
    written. All of them, and those of earlier entries, are in `unflushed`: memory and journal have
    a newer value than the files of rows.
    """

    def __init__(self, most_rows: int) -> None:
        super().__init__(most_rows)
        self.in_flight = DirtyRows(most_rows)
        self.unflushed = DirtyRows(most_rows)

    @property
    def row_bytes(self) -> int:
        """Memory of a row."""
        return super().row_bytes + self.in_flight.row_bytes + self.unflushed.row_bytes

    def grow(self, num_rows: int) -> None:
        """Adds unmarked rows, up to `num_rows`."""
        super().grow(num_rows)
        self.in_flight.grow(num_rows)
        self.unflushed.grow(num_rows)

    def mark(self, rows: np.ndarray) -> None:
        """Adds distinct rows."""
        super().mark(rows)
        self.unflushed.mark(rows)

    def take(self) -> np.ndarray:
        """Returns the dirty rows in order, for a journal entry."""
        rows = super().take()
        self.in_flight.mark(rows)
        return rows

    def journaled(self) -> None:
        """Records that the entries of all taken rows are on disk."""
        self.in_flight.take()

    def flushable(self) -> np.ndarray:
        """Returns the rows, in any order, whose present value is in the journal alone."""
        rows = self.unflushed.rows
        return rows[~(self.has(rows) | self.in_flight.has(rows))]

    def flushed(self, rows: np.ndarray) -> None:
        """Records that the files have the value of rows, except of those that changed meanwhile."""
        self.unflushed.unmark(rows[~self.has(rows)])
