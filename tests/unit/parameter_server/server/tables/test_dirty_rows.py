"""Changed rows, against a set."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stratagem.parameter_server.server.tables.dirty_rows import DirtyRows

# The number of rows decides how they are put in order.
ROWS = st.sets(st.integers(0, 99)) | st.sets(st.integers(0, 99), max_size=4)


@given(
    st.lists(st.tuples(st.sampled_from(["mark", "unmark", "take", "put back"]), ROWS), max_size=20)
)
def test_rows_are_those_of_a_set(operations) -> None:
    dirty, wanted = DirtyRows(100), set[int]()
    dirty.grow(50)
    dirty.grow(100)
    for name, rows in operations:
        marked = np.array([*rows], np.int64)
        if name == "mark":
            dirty.mark(marked)
            wanted |= rows
        elif name == "unmark":
            dirty.unmark(np.array([*rows & wanted], np.int64))
            wanted -= rows
        else:
            taken = dirty.take()
            assert taken.tolist() == sorted(wanted)
            wanted.clear()
            if name == "put back":
                dirty.mark(marked)
                dirty.mark(taken)
                wanted = rows | {*taken.tolist()}
        assert len(dirty) == len(wanted)
        assert sorted(dirty.rows.tolist()) == np.flatnonzero(dirty.has(np.arange(100))).tolist()
        assert {*dirty.rows.tolist()} == wanted
