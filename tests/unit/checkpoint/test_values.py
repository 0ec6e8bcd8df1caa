"""Values of variables on the host, and values assigned to variables, on two replicas."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.checkpoint.objects import part_of
from stratagem.checkpoint.values import (
    assign_local_values,
    assign_values,
    components_of,
    has_components,
    local_arrays_of,
    local_values_of,
    values_of,
)
from stratagem.variables.registry import home_of

PATHS = {"plain": "plain", "mirrored": "mirrored", "counts": "counts"}


@pytest.fixture
def variables() -> dict[str, Any]:
    """A plain variable, a mirrored one, and one with a component on each replica."""
    with sg.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        mirrored = sg.Variable([1.0, 2.0])
        counts = sg.Variable(0.0, synchronization="on_read", aggregation="sum", trainable=False)
    mirrored_strategy = mirrored.distribute_strategy
    mirrored_strategy.run(
        lambda: counts.assign_add(
            keras.ops.cast(sg.get_replica_context().replica_id_in_sync_group, "float32") + 1
        )
    )
    return {"plain": keras.Variable(np.int32(3)), "mirrored": mirrored, "counts": counts}


def test_values_are_logical_and_components_are_of_each_replica(variables) -> None:
    part = part_of("model", variables)
    values = values_of(part)
    assert {name: value.tolist() for name, value in values.items()} == {
        "plain": 3,
        "mirrored": [1, 2],
        "counts": 3,
    }
    assert all(isinstance(value, np.ndarray) for value in values.values())
    assert [one for one in variables if has_components(variables[one])] == ["counts"]
    assert {name: value.tolist() for name, value in components_of(part).items()} == {
        "counts": [1, 2]
    }


def test_value_is_in_the_dtype_of_the_variable_under_mixed_precision() -> None:
    class Layer(keras.layers.Layer):
        def build(self, input_shape: Any) -> None:
            self.weight = self.add_weight(shape=(), initializer="ones")

        def call(self, inputs: Any) -> Any:
            self.seen = self.weight.value.dtype, values_of(part_of("w", self.weight))["value"].dtype
            return inputs

    with sg.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        layer = Layer(dtype="mixed_float16")
        layer(np.ones((1, 1), np.float32))
    assert layer.seen == (np.float16, np.float32)


def test_local_values_come_back(variables) -> None:
    part = part_of("model", variables)
    saved = {
        name: value.copy() for name, value in local_values_of(part, local_arrays_of(part)).items()
    }
    assert saved["counts"].tolist() == [1, 2]
    for variable in variables.values():
        variable.assign(keras.ops.zeros_like(variable.value))
    assign_local_values(part, PATHS, saved)
    assert components_of(part)["counts"].tolist() == [1, 2]
    assert values_of(part)["mirrored"].tolist() == [1, 2]
    assert int(variables["plain"].value) == 3


def test_components_are_restored_if_they_fit_and_else_their_aggregate(variables) -> None:
    part = part_of("model", variables)
    values = {"plain": np.array(7), "mirrored": np.array([5.0, 6.0]), "counts": np.array(9.0)}
    assign_values(part, PATHS, dict(values), {"counts": np.array([4.0, 5.0])})
    assert components_of(part)["counts"].tolist() == [4, 5]
    assert values_of(part)["mirrored"].tolist() == [5, 6]
    assign_values(part, PATHS, values, {"counts": np.array([1.0, 2.0, 3.0])})
    assert not values  # their memory serves the next ones
    assert values_of(part)["counts"] == 9
    assert components_of(part)["counts"].sum() == 9


def test_value_assigned_while_a_step_is_traced_is_a_value_and_no_tracer(variables) -> None:
    own = {name: variables[name] for name in ("plain", "mirrored")}
    part = part_of("model", own)
    values = {"plain": np.array(7), "mirrored": np.array([5.0, 6.0])}

    def step(x: Any) -> Any:
        assign_values(part, {name: name for name in own}, dict(values), {})
        return x

    home_of(variables["mirrored"]).strategy.run(step, args=(1.0,))
    assert values_of(part)["plain"] == 7
    assert values_of(part)["mirrored"].tolist() == [5, 6]
