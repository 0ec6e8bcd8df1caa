"""Rows by their ids."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratagem.parameter_server.server.rows import aligned_empty, combine_rows, parts_of_shards


@given(st.lists(st.integers(0, 30), max_size=60), st.integers(0, 3))
def test_rows_of_one_id_are_added(ids, width) -> None:
    rows = np.arange(len(ids) * width, dtype=np.float64).reshape(len(ids), width)
    got_ids, sums = combine_rows(np.array(ids, np.int64), rows)
    assert got_ids.tolist() == sorted(set(ids))
    dense = np.zeros((31, width))
    np.add.at(dense, np.array(ids, np.int64), rows)
    np.testing.assert_allclose(sums, dense[got_ids])


@pytest.mark.parametrize("highest", [5, 10**4, 2**62, -1])
@pytest.mark.parametrize("dtype", ["int64", "int32", "uint64"])
def test_many_rows_are_added_in_their_order(highest, dtype) -> None:
    rng = np.random.default_rng(0)
    ids = rng.integers(*((-9, 9) if highest < 0 else (0, highest)), 3_000).astype(dtype)
    rows = rng.normal(size=(3_000, 2)).astype(np.float32)
    got_ids, sums = combine_rows(ids, rows)
    assert got_ids.dtype == ids.dtype
    wanted_ids, places = np.unique(ids, return_inverse=True)
    np.testing.assert_array_equal(got_ids, wanted_ids)
    wanted = np.zeros((len(wanted_ids), 2))
    np.add.at(wanted, places, rows)
    np.testing.assert_allclose(sums, wanted, rtol=1e-4, atol=1e-4)


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


@pytest.mark.parametrize("shape", [(1,), (5, 7), (3, 2, 2)])
def test_memory_is_aligned_for_jax(shape) -> None:
    for dtype in ("float32", "int8", "float64"):
        array = aligned_empty(shape, np.dtype(dtype))
        assert array.shape == shape
        assert array.dtype == dtype
        assert array.ctypes.data % 64 == 0
        array[...] = 1
