"""From components to a value and back, against NumPy."""

from __future__ import annotations

import jax.numpy as jnp
import keras
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import stratagem as sg
from stratagem.options import VariableAggregation
from stratagem.variables.components import aggregate_components, spread_over_components

NONE, SUM, MEAN, FIRST = VariableAggregation


@pytest.mark.parametrize(("aggregation", "expected"), [(SUM, 23.0), (MEAN, 11.5), (FIRST, 11.0)])
def test_components_stand_for_their_aggregate(aggregation, expected) -> None:
    """The last row of the table of aggregations: components [11 | 12]."""
    value = aggregate_components(jnp.asarray([11.0, 12.0]), aggregation, "v")
    assert value.shape == ()
    assert float(value) == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32", "int8", "bool"])
def test_aggregate_keeps_shape_and_dtype(dtype) -> None:
    components = np.array([[0, 1, 1], [0, 0, 1]]).astype(getattr(ml_dtypes, dtype, dtype))
    for aggregation, expected in [(SUM, [0, 1, 2]), (FIRST, [0, 1, 1]), (MEAN, [0, 0.5, 1])]:
        if aggregation is MEAN and components.dtype.kind in "bi":
            continue  # such a variable cannot be made
        value = np.asarray(aggregate_components(jnp.asarray(components), aggregation, "v"))
        assert value.dtype == components.dtype
        np.testing.assert_array_equal(value, np.array(expected).astype(components.dtype))


def test_components_without_aggregation_stand_for_nothing() -> None:
    with pytest.raises(
        ValueError, match=r"'a/count' is ON_READ with aggregation NONE(?s:.)*Fix: cr"
    ):
        aggregate_components(jnp.ones(2), NONE, "a/count")


@pytest.mark.parametrize(
    ("aggregation", "components"), [(SUM, [2, 2]), (MEAN, [4, 4]), (FIRST, [4, 4]), (NONE, [4, 4])]
)
@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_value_is_spread_as_its_aggregation_says(aggregation, components, dtype) -> None:
    """`assign(4)` with two replicas."""
    spread = spread_over_components(np.asarray(4, dtype), aggregation, 2)
    assert spread.dtype == dtype
    np.testing.assert_array_equal(spread, components)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "bool", "uint8"])
def test_spread_value_keeps_its_shape_and_dtype(dtype) -> None:
    value = np.array([[1, 0, 1]]).astype(getattr(ml_dtypes, dtype, dtype))
    for aggregation in VariableAggregation:
        spread = spread_over_components(value, aggregation, 3)
        assert spread.shape == (3, 1, 3)
        assert spread.dtype == value.dtype


def test_spread_value_does_not_share_memory_with_the_value() -> None:
    value = np.ones(2)
    spread_over_components(value, MEAN, 2)[0] = 5.0
    np.testing.assert_array_equal(value, [1.0, 1.0])


@settings(deadline=None)
@given(value=st.integers(-(2**31), 2**31 - 1), num_replicas=st.integers(1, 8))
def test_components_of_an_integer_add_up_to_it(value, num_replicas) -> None:
    spread = spread_over_components(np.int32(value), SUM, num_replicas)
    assert sum(map(int, spread)) == value
    assert max(spread) - min(spread) < num_replicas


@settings(deadline=None)
@given(
    value=st.floats(width=32, allow_nan=False, allow_infinity=False),
    num_replicas=st.integers(1, 8),
)
def test_components_of_a_float_are_equal_and_add_up_to_it(value, num_replicas) -> None:
    spread = spread_over_components(np.float32(value), SUM, num_replicas)
    assert len(set(spread.tolist())) == 1
    np.testing.assert_allclose(spread.astype(np.float64).sum(), value, rtol=1e-6, atol=1e-37)


@pytest.mark.parametrize("num_replicas", [3, 7])
def test_mean_of_equal_values_is_that_value(num_replicas) -> None:
    """A third of three times a value is another number for every seventh float32."""
    values = np.random.default_rng(0).standard_normal(256).astype("float32")
    strategy = sg.MirroredStrategy([f"cpu:{index}" for index in range(num_replicas)])
    with strategy.scope():
        variable = sg.Variable(values, synchronization="on_read", aggregation="mean")
        norm = keras.layers.BatchNormalization()
        norm.build((None, 256))
    np.testing.assert_array_equal(variable.value, values)
    variable.assign(values * 3)
    np.testing.assert_array_equal(variable.value, values * 3)
    norm.set_weights([values, values, values, np.abs(values)])
    np.testing.assert_array_equal(norm.get_weights(), [values, values, values, np.abs(values)])
    of_replicas = strategy.run(lambda rows: rows, args=(values,))
    np.testing.assert_array_equal(strategy.reduce("mean", of_replicas, axis=None), values)


def test_mean_is_taken_element_by_element() -> None:
    components = jnp.asarray([[0.1, np.inf, np.nan], [0.1, np.inf, np.nan], [0.1, 1.0, np.nan]])
    mean = aggregate_components(components, MEAN, "v")
    np.testing.assert_array_equal(mean, np.asarray([0.1, np.inf, np.nan], "float32"))
