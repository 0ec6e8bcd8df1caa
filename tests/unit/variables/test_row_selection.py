"""Which rows an index needs: compared with NumPy, which has the whole array."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

from stratagem.variables.row_selection import as_slice, local_rows, select_rows

VALUES = np.arange(60).reshape(10, 3, 2)
MASK = VALUES[:, 0, 0] % 4 == 0
INDICES = [
    np.s_[2:9:3],
    np.s_[::-1],
    np.s_[8:1:-3],
    np.s_[-20:20],
    np.s_[5:5],
    np.s_[3:1],
    np.s_[5],
    np.s_[-1],
    np.s_[np.int32(4)],
    np.s_[()],
    np.s_[...],
    np.s_[..., 1],
    np.s_[2, ..., 1],
    np.s_[..., 4, 1, 0],
    np.s_[4, 1, 0, ...],
    np.s_[None, 3],
    np.s_[None, 2:4, None, 1],
    np.s_[:, 1],
    np.s_[[1, 1, -1]],
    np.s_[[[1, 2], [3, -10]]],
    np.s_[np.array([3, 1], "uint8"), [0, 2]],
    np.s_[[1, 5], :, [0, 1]],
    np.s_[1, :, [0, 1]],
    np.s_[2:8, [0, 2], 1],
    np.s_[[]],
    np.s_[MASK],
    np.s_[MASK.tolist()],
    np.s_[np.zeros(10, bool)],
    np.s_[VALUES[..., 0] > 20],
    np.s_[VALUES > 41],
    np.s_[MASK, 1],
    np.s_[True],
    np.s_[None, True, 2:3],
]


@pytest.mark.parametrize("index", INDICES, ids=range(len(INDICES)))
def test_index_in_the_selected_rows_is_that_in_the_whole(index) -> None:
    expected = VALUES[index]
    selected = select_rows(index, VALUES.shape, name="v")
    rows = VALUES if selected.rows is None else VALUES[np.asarray(selected.rows, int)]
    np.testing.assert_array_equal(rows[selected.index], expected)
    np.testing.assert_array_equal(jnp.asarray(rows)[selected.index], expected)


@pytest.mark.parametrize(
    ("index", "rows"),
    [
        (np.s_[2:9:3, 1], [2, 5, 8]),
        (np.s_[8:1:-3], [8, 5, 2]),
        (-1, [9]),
        ([7, 7, -1, 2], [2, 7, 9]),
        (VALUES[..., 0] > 50, [8, 9]),
        (np.s_[..., 4, 1, 0], [4]),
        (np.s_[5:5], []),
    ],
)
def test_only_rows_that_are_needed_are_selected(index, rows) -> None:
    selected = select_rows(index, VALUES.shape, name="v").rows
    assert selected is not None
    assert list(selected) == rows


@pytest.mark.parametrize("index", [np.s_[:], np.s_[:, 0], np.s_[...], np.s_[..., 1], np.s_[None]])
def test_all_rows_are_none_in_particular(index) -> None:
    assert select_rows(index, VALUES.shape, name="v").rows is None


def test_arrays_of_jax_and_variables_are_indices() -> None:
    for index in (jnp.array([3, 1]), keras.Variable([3, 1], dtype="int32")):
        selected = select_rows(index, VALUES.shape, name="v")
        np.testing.assert_array_equal(VALUES[selected.rows][selected.index], VALUES[[3, 1]])
    assert select_rows(jnp.array(4), VALUES.shape, name="v").rows == range(4, 5)
    assert select_rows(slice(jnp.array(4), None), VALUES.shape, name="v").rows == range(4, 10)


@pytest.mark.parametrize(
    "make",
    [
        lambda i: i,
        lambda i: (i, 1),
        lambda i: (1, i),
        lambda i: slice(i, None),
        lambda i: slice(None, i),
        lambda i: slice(None, None, i),
        lambda i: [1, i],
        lambda i: jnp.stack([i, i]),
    ],
    ids=["alone", "first", "second", "start", "stop", "step", "list", "array"],
)
def test_traced_index_is_refused(make) -> None:
    def index(i: Any) -> Any:
        return select_rows(make(i), VALUES.shape, name="weights")

    with pytest.raises(TypeError, match=r"'weights' was indexed by the traced value"):
        jax.jit(index)(1)


@pytest.mark.parametrize(
    "index",
    [
        10,
        -11,
        np.s_[0, 3],
        np.s_[2:4, 0, 2],
        [0, 10],
        np.s_[0, 0, 0, 0],
        MASK[:9],
        1.5,
        np.s_[..., ...],
    ],
)
def test_index_that_is_out_of_range_or_none_is_refused(index) -> None:
    with pytest.raises(IndexError):
        VALUES[index]
    with pytest.raises(IndexError, match=r"an index within shape \(10, 3, 2\)"):
        select_rows(index, VALUES.shape, name="v")


@pytest.mark.parametrize("index", [np.s_[::0], np.s_[1, ::0]])
def test_step_of_zero_is_refused(index) -> None:
    with pytest.raises(ValueError, match="a step other than 0"):
        select_rows(index, VALUES.shape, name="v")


@pytest.mark.parametrize(
    "rows",
    [range(10), range(2, 9, 3), range(9, -1, -1), range(8, 0, -3), range(4, 4), range(7, 8)],
    ids=repr,
)
def test_range_goes_to_its_shards_and_comes_back(rows) -> None:
    parts = local_rows(rows, [3, 3, 4])
    shards = np.split(VALUES, [3, 6])
    found = [shard[as_slice(part)] for shard, part in zip(shards, parts, strict=True)]
    joined = np.concatenate(found)
    np.testing.assert_array_equal(
        joined[::-1] if rows.step < 0 else joined, VALUES[np.asarray(rows, int)]
    )


def test_numbers_go_to_their_shards() -> None:
    parts = local_rows(np.array([0, 3, 5, 9]), [3, 3, 4])
    assert [list(part) for part in parts] == [[0], [0, 2], [3]]


def test_slice_picks_a_range() -> None:
    assert as_slice(range(2, 9, 3)) == slice(2, 9, 3)
    assert VALUES[as_slice(range(9, -1, -2))].tolist() == VALUES[::-2].tolist()
