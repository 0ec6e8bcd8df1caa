"""Changed rows on their way to journal and disk, against sets."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stratagem.parameter_server.server.tables.tiered_shard import RowStates

ROWS = st.sets(st.integers(0, 49), max_size=12)
OPERATIONS = ["mark", "take", "flush"]


@given(st.lists(st.tuples(st.sampled_from(OPERATIONS), ROWS), max_size=30))
def test_rows_are_flushable_once_they_were_taken(operations) -> None:
    states = RowStates(50)
    states.grow(50)
    dirty, unflushed = set[int](), set[int]()
    for name, rows in operations:
        if name == "mark":
            states.mark(np.array([*rows], np.int64))
            dirty |= rows
            unflushed |= rows
        elif name == "take":
            assert states.take().tolist() == sorted(dirty)
            dirty = set()
        else:
            flushable = states.flushable()
            assert {*flushable.tolist()} == unflushed - dirty
            states.mark(np.array([*rows], np.int64))  # they change during the write
            states.flushed(flushable)
            dirty |= rows
            unflushed = (unflushed - {*flushable.tolist()}) | dirty
        assert {*states.unflushed.rows.tolist()} == unflushed
        assert len(states) == len(dirty)
    assert states.row_bytes == 2
