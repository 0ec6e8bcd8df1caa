"""Numeric and bucketized columns against NumPy and Keras."""

from __future__ import annotations

import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem as sg

fc = sg.feature_column
AGE = fc.numeric_column("age")


def test_buckets_of_numbers_are_those_of_numpy() -> None:
    ages = np.array([[10.0, 18.0], [30.0, 70.0]], np.float32)
    source = fc.numeric_column("age", shape=(2,), normalizer_fn=lambda x: x / 2.0)
    column = fc.bucketized_column(source, [5.0, 20.0])
    expected = np.digitize(ages / 2.0, [5.0, 20.0]) + np.array([0, 3])
    np.testing.assert_array_equal(column.ids({"age": ages}), expected)
    ids, weights = column.ids_and_weights({"age": jnp.asarray(ages)})
    assert weights is None
    np.testing.assert_array_equal(ids, expected)
    one_hot = np.zeros((2, 6))
    one_hot[[[0], [1]], expected] = 1.0
    np.testing.assert_array_equal(column.numbers({"age": jnp.asarray(ages)}), one_hot)


def test_discretization_layer_of_keras_makes_the_same_buckets() -> None:
    column = fc.bucketized_column(fc.numeric_column("x"), [0.0, 1.0])
    values = np.array([-1.0, 0.0, 0.5, 1.0, 2.0], np.float32)
    expected = keras.layers.Discretization(bin_boundaries=[0.0, 1.0])(values)
    np.testing.assert_array_equal(column.ids({"x": values})[:, 0], expected)


CITY = fc.categorical_column_with_hash_bucket("city", 100)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fc.numeric_column("x", shape=(0,)), r"received shape=\(0,\)"),
        (lambda: fc.numeric_column("x", dtype="str"), "received dtype='str'"),
        (lambda: fc.numeric_column("x", (2,), default_value=[1, 2, 3]), "received default_value="),
        (lambda: fc.bucketized_column("x", [1]), "bucketized_column received 'x'"),
        (lambda: fc.bucketized_column(AGE, [2, 1]), r"received boundaries=\[2, 1\]"),
    ],
)
def test_columns_that_cannot_be_are_refused(make, message) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_normalizer_that_cannot_be_called_is_refused() -> None:
    with pytest.raises(TypeError, match="received normalizer_fn=3"):
        fc.numeric_column("x", normalizer_fn=3)
