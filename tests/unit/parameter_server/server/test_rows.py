"""Rows by their ids."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratagem.parameter_server.server.shards import aligned_empty, combine_rows, sum_rows


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
    wanted = np.zeros((len(wanted_ids), 2), np.float32)
    np.add.at(wanted, places, rows)
    np.testing.assert_array_equal(sums, wanted)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "int8", "complex64"])
def test_sums_have_the_type_of_the_rows(dtype) -> None:
    rows = np.arange(24).reshape(4, 3, 2).astype(dtype)
    sums = sum_rows(np.array([2, 0, 2, 2]), 3, rows)
    assert sums.dtype == rows.dtype
    wanted = [rows[1], np.zeros((3, 2)), rows[0] + rows[2] + rows[3]]
    np.testing.assert_array_equal(sums, np.array(wanted, dtype))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_rounded_once(dtype) -> None:
    # Each 1 is lost if it is added to the large number in half precision.
    rows = np.array([4096] + [1] * 4096, dtype)[:, None]
    assert sum_rows(np.zeros(4097, np.intp), 1, rows).tolist() == [[8192]]


def test_numbers_that_are_not_finite_stay_in_their_sum() -> None:
    rows = np.array([[np.inf], [1], [np.nan], [2]], np.float32)
    sums = sum_rows(np.array([1, 0, 2, 0]), 3, rows)
    np.testing.assert_array_equal(sums, [[3], [np.inf], [np.nan]])


def test_too_few_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="same size"):
        sum_rows(np.array([0, 1]), 2, np.ones((3, 1), np.float32))


@pytest.mark.parametrize("shape", [(1,), (5, 7), (3, 2, 2)])
def test_memory_is_aligned_for_jax(shape) -> None:
    for dtype in ("float32", "int8", "float64"):
        array = aligned_empty(shape, np.dtype(dtype))
        assert array.shape == shape
        assert array.dtype == dtype
        assert array.ctypes.data % 64 == 0
        array[...] = 1
