"""Components of ON_READ variables after members were lost: the value stays."""

from __future__ import annotations

import numpy as np
import pytest

from stratagem.options import VariableAggregation
from stratagem.variables.components import aggregate_components, components_of_members

_AGGREGATIONS = [
    VariableAggregation.SUM,
    VariableAggregation.MEAN,
    VariableAggregation.ONLY_FIRST_REPLICA,
]


@pytest.mark.parametrize("aggregation", _AGGREGATIONS)
@pytest.mark.parametrize("kept", [[1, 2], [0, 2], [3]], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_value_of_the_members_that_are_left(aggregation, kept, dtype) -> None:
    components = np.arange(8).reshape(4, 2).astype(dtype) ** 2
    rows = components_of_members(components, aggregation, kept)
    assert rows.shape == (len(kept), 2)
    assert rows.dtype == components.dtype
    expected = components
    if aggregation is VariableAggregation.MEAN:  # the mean of those that are left
        expected = components[kept]
    value = aggregate_components(rows, aggregation, "v")
    np.testing.assert_array_equal(value, aggregate_components(expected, aggregation, "v"))
    np.testing.assert_array_equal(rows[1:], components[kept[1:]])


def test_arguments_are_not_changed() -> None:
    components = np.ones((3, 1))
    components_of_members(components, VariableAggregation.SUM, [0, 1])
    assert components.tolist() == [[1.0]] * 3


def test_flags_are_not_added() -> None:
    components = np.array([[True], [True]])
    rows = components_of_members(components, VariableAggregation.SUM, [1])
    assert rows.tolist() == [[True]]


@pytest.mark.parametrize("aggregation", _AGGREGATIONS)
@pytest.mark.parametrize("kept", [[0, None, 1], [None, 1], [None, 0, None]], ids=str)
def test_new_members_do_not_change_the_value(aggregation, kept) -> None:
    components = np.array([[1.0, 2.0], [5.0, 8.0]], np.float32)
    present = [row for row in kept if row is not None]
    rows = components_of_members(components, aggregation, kept)
    is_mean = aggregation is VariableAggregation.MEAN
    expected = aggregate_components(
        components[present] if is_mean else components, aggregation, "v"
    )
    np.testing.assert_allclose(aggregate_components(rows, aggregation, "v"), expected)
