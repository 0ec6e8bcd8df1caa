"""Rows by their ids."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stratagem.servers.rows import combine_rows, parts_of_shards


@given(st.lists(st.integers(0, 30), max_size=60), st.integers(0, 3))
def test_rows_of_one_id_are_added(ids, width) -> None:
    rows = np.arange(len(ids) * width, dtype=np.float64).reshape(len(ids), width)
    got_ids, sums = combine_rows(np.array(ids, np.int64), rows)
    assert got_ids.tolist() == sorted(set(ids))
    dense = np.zeros((31, width))
    np.add.at(dense, np.array(ids, np.int64), rows)
    np.testing.assert_allclose(sums, dense[got_ids])


@given(st.lists(st.integers(0, 6), min_size=1, max_size=6), st.data())
def test_ids_go_to_the_shard_that_holds_them(rows_of_shards, data) -> None:
    num_rows = sum(rows_of_shards)
    ids = np.array(sorted(data.draw(st.sets(st.integers(0, max(0, num_rows - 1))))), np.int64)
    ids = ids[ids < num_rows]
    owners = np.repeat(np.arange(len(rows_of_shards)), rows_of_shards)
    parts = parts_of_shards(ids, rows_of_shards)
    assert [ids[part].tolist() for part in parts] == [
        ids[owners[ids] == shard].tolist() for shard in range(len(rows_of_shards))
    ]
