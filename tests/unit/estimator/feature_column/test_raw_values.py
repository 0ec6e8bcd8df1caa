"""Raw features in every form become NumPy arrays with one row per example."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from stratagem.estimator.feature_column.columns import (
    as_bytes,
    categorical_rows,
    feature_of,
    numeric_rows,
)


class Ragged:
    """Object with the `to_list` of ragged tensors and pandas columns."""

    def to_list(self) -> list[list[int]]:
        return [[1], [2, 3]]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (["a", "b"], [["a"], ["b"]]),
        (np.array(["a", "b"]), [["a"], ["b"]]),
        (np.array([b"a", b"b"]), [[b"a"], [b"b"]]),
        (np.array([["a", "b"]], object), [["a", "b"]]),
        ([["a"], ["b", "c", "d"], []], [["a", *[None] * 3], ["b", "c", "d", None], [None] * 4]),
        ([1, None], [[1], [None]]),
        (jnp.array([[1, 2]]), [[1, 2]]),
        (Ragged(), [[1, None], [2, 3]]),
        ([np.array([1, 2]), np.array([3])], [[1, 2], [3, None]]),
        ([], []),
    ],
)
def test_categorical_rows_have_one_row_an_example(value, expected) -> None:
    rows = categorical_rows(value, "x")
    assert rows.ndim == 2
    assert rows.tolist() == expected


@pytest.mark.parametrize("value", [np.zeros((2, 2, 2), int), np.array(1)])
def test_categorical_rows_of_other_dimensions_are_refused(value) -> None:
    with pytest.raises(ValueError, match="of a categorical column has shape"):
        categorical_rows(value, "x")


@pytest.mark.parametrize("value", [[1.5, 2.5], [True, False], [["a", 1.5], ["b"]]])
def test_categorical_rows_of_fractions_are_refused(value) -> None:
    with pytest.raises(ValueError, match="of a categorical column has dtype"):
        categorical_rows(value, "x")


@pytest.mark.parametrize(
    ("value", "shape", "default", "expected"),
    [
        ([1, 2], (1,), None, [[1.0], [2.0]]),
        ([[1, 2]], (2,), None, [[1.0, 2.0]]),
        ([1, None], (1,), (7.0,), [[1.0], [7.0]]),
        ([[None, 2], [3, None]], (2,), (7.0, 8.0), [[7.0, 2.0], [3.0, 8.0]]),
        ([[None, 2]], (2,), (7.0,), [[7.0, 2.0]]),
        (np.array([True, False]), (1,), None, [[1.0], [0.0]]),
    ],
)
def test_numeric_rows_have_the_shape_of_their_column(value, shape, default, expected) -> None:
    rows = numeric_rows(value, "x", shape, default, "float32")
    assert rows.dtype == np.float32
    assert rows.tolist() == expected


@pytest.mark.parametrize("value", [["a"], ["a", None], np.array(["a"])])
def test_numeric_rows_of_strings_are_refused(value) -> None:
    with pytest.raises(ValueError, match="of a numeric column has dtype"):
        numeric_rows(value, "x", (1,), (0.0,), "float32")


def test_numeric_rows_that_lack_values_without_a_default_are_refused() -> None:
    with pytest.raises(ValueError, match="has 1 missing values"):
        numeric_rows([1.0, None], "x", (1,), None, "float32")


def test_numeric_rows_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"has shape \(2, 3\)"):
        numeric_rows(np.zeros((2, 3)), "x", (2,), None, "float32")


def test_feature_that_is_missing_is_named() -> None:
    with pytest.raises(ValueError, match="Feature 'x' is missing from the features"):
        feature_of({"y": 1}, "x")
    with pytest.raises(ValueError, match="features is of type ndarray"):
        feature_of(np.zeros(2), "x")


def test_as_bytes_writes_integers_as_tensorflow_does() -> None:
    assert [as_bytes(value) for value in ("é", b"x", -3)] == ["é".encode(), b"x", b"-3"]
