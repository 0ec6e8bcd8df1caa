"""Arrays some rows of which are changed: compared with NumPy."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import stratagem as sg
from stratagem.variables.sharded_variable import changed_rows, sets_rows
from tests.unit.variables.row_methods import CHANGES

START = np.arange(1.0, 9, dtype="float32").reshape(4, 2)
ROWS = np.array([[10.0, -10.0], [0.5, 3.0], [4.0, 2.0]], "float32")


@pytest.mark.parametrize(
    ("method", "change"),
    CHANGES,
)
def test_rows_change_as_numpy_changes_them(method, change) -> None:
    indices = np.array([3, 0, 9])  # of which the last is past the end
    expected = START.copy()
    expected[[3, 0]] = change(START[[3, 0]], ROWS[:2])
    got = changed_rows(method, START, sg.IndexedSlices(ROWS, indices))
    np.testing.assert_allclose(got, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("scatter_add", 1 + 2 + 5),
        ("scatter_mul", 1 * (2 + 5)),
        ("scatter_min", 1),
        ("scatter_max", 5),
    ],
)
def test_rows_of_equal_index_are_added_up_or_all_count(method, expected) -> None:
    slices = sg.IndexedSlices(jnp.array([2.0, 5.0]), jnp.array([0, 0]))
    assert float(changed_rows(method, np.ones(1, "float32"), slices)[0]) == expected


def test_values_take_the_dtype_of_the_array() -> None:
    slices = sg.IndexedSlices(np.array([2.0]), np.array([1]))
    got = changed_rows("scatter_update", np.zeros(2, "int32"), slices)
    assert got.dtype == np.int32
    assert got.tolist() == [0, 2]


def test_methods_that_set_are_reported() -> None:
    setting = {"scatter_min", "scatter_max", "scatter_update"}
    every = setting | {"scatter_add", "scatter_sub", "scatter_mul", "scatter_div"}
    assert {method for method in every if sets_rows(method)} == setting
