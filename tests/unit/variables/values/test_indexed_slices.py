"""IndexedSlices: dense form, combined rows, and mismatched parts."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stratagem as sg

ROWS = sg.IndexedSlices(
    jnp.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), jnp.array([2, 0, 2]), (4, 2)
)
WHOLE = np.array([[3.0, 4.0], [0.0, 0.0], [6.0, 8.0], [0.0, 0.0]])


def test_rows_of_equal_index_count_as_their_sum() -> None:
    np.testing.assert_array_equal(ROWS.to_dense(), WHOLE)
    np.testing.assert_array_equal(jnp.asarray(ROWS), WHOLE)
    combined = ROWS.combined()
    assert combined.indices.tolist() == [0, 2]
    assert combined.values.tolist() == [[3.0, 4.0], [6.0, 8.0]]
    assert combined.dense_shape == (4, 2)


def test_in_a_compiled_program_rows_left_over_are_past_the_end() -> None:
    combined = jax.jit(lambda rows: rows.combined())(ROWS)
    assert combined.indices.tolist() == [0, 2, np.iinfo(np.int32).max]
    assert combined.values.tolist() == [[3.0, 4.0], [6.0, 8.0], [0.0, 0.0]]
    np.testing.assert_array_equal(combined.to_dense(), WHOLE)


def test_negative_indices_count_from_the_end() -> None:
    rows = sg.IndexedSlices(jnp.ones(2), jnp.array([-1, 3]), (4,))
    np.testing.assert_array_equal(rows.to_dense(), [0, 0, 0, 2])
    assert rows.combined().indices.tolist() == [3]


def test_is_a_pytree_of_rows_and_indices() -> None:
    assert [leaf.shape for leaf in jax.tree.leaves(ROWS)] == [(3, 2), (3,)]
    doubled = dataclasses.replace(ROWS, values=2 * ROWS.values)
    np.testing.assert_array_equal(doubled.to_dense(), 2 * WHOLE)


def test_indices_that_a_tree_map_made_floats_are_refused() -> None:
    halved = jax.tree.map(lambda leaf: 0.5 * leaf.astype("float32"), ROWS)
    for use in (halved.to_dense, halved.combined):
        with pytest.raises(TypeError, match="indices of dtype float32"):
            use()


@pytest.mark.parametrize(
    ("values", "indices", "dense_shape", "words"),
    [
        ((2, 3), (3,), (4, 3), r"values of shape \(2, 3\) and indices of shape \(3,\)"),
        ((2, 3), (2, 1), (4, 3), r"indices of shape \(2, 1\)"),
        ((), (), None, r"values of shape \(\)"),
        ((2, 3), (2,), (4, 2), r"rows of shape \(3,\) and dense_shape=\(4, 2\)"),
        ((2, 3), (2,), None, "without dense_shape"),
    ],
)
def test_parts_that_do_not_fit_are_refused(values, indices, dense_shape, words) -> None:
    slices = sg.IndexedSlices(np.ones(values), np.zeros(indices, int), dense_shape)
    with pytest.raises(ValueError, match=words):
        slices.to_dense()
