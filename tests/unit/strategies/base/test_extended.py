"""Devices of `strategy.extended`, and values that it refuses."""

from __future__ import annotations

import copy

import jax
import jax.numpy as jnp
import pytest

import stratagem as sg


@pytest.fixture
def pair():
    return sg.MirroredStrategy(["cpu:2", "cpu:4"])


def test_devices_of_workers_and_parameters_are_those_of_the_replicas(pair) -> None:
    devices = (jax.devices()[2], jax.devices()[4])
    assert pair.extended.worker_devices == devices
    assert pair.extended.parameter_devices == devices
    seen = []
    pair.run(lambda: seen.append(sg.get_replica_context().devices))
    assert seen == [devices]


def test_default_strategy_has_no_devices() -> None:
    extended = sg.get_strategy().extended
    for name in ("worker_devices", "parameter_devices"):
        with pytest.raises(RuntimeError, match=f"{name} was asked of the default strategy"):
            getattr(extended, name)


def test_extended_of_a_copy_is_a_view_of_the_copy(pair) -> None:
    copied = copy.deepcopy(pair)
    assert copied.extended is not pair.extended
    with copied.scope():
        variable = sg.Variable(1.0)
    assert copied.extended.variable_created_in_scope(variable)
    assert not pair.extended.variable_created_in_scope(variable)


def test_plain_value_cannot_be_summed(pair) -> None:
    with pytest.raises(ValueError, match="received a plain value"):
        pair.extended.reduce_to("sum", jnp.ones(2), None)
    assert float(pair.extended.reduce_to("mean", 4.0, None)) == 4.0


def test_structures_are_reduced_leaf_by_leaf(pair) -> None:
    value = pair.run(lambda: {"a": jnp.ones(()), "b": [jnp.ones(2)]})
    total = pair.extended.reduce_to("sum", value, None)
    assert isinstance(total["a"], sg.Mirrored)
    assert isinstance(total["b"][0], sg.Mirrored)
    assert float(total["a"]) == 2.0


def test_update_hands_over_plain_values_in_structures(pair) -> None:
    with pair.scope():
        variable = sg.Variable(1.0)
    mirrored = pair.extended.broadcast_to(jnp.float32(2.0), variable)
    seen = []

    def assign(component, tree, *, scale):
        seen.append((tree["x"][0], scale))
        return component.assign(tree["x"][0] * scale)

    result = pair.extended.update(variable, assign, ({"x": [mirrored]},), {"scale": 3.0})
    assert float(result) == 6.0
    assert isinstance(seen[0][0], jax.Array)
    assert seen[0][1] == 3.0


def test_structure_of_results_without_grouping_is_one_a_copy(pair) -> None:
    with pair.scope():
        variable = sg.Variable(1.0)
    results = pair.extended.update(variable, lambda v: {"v": v.value}, group=False)
    assert [float(result["v"]) for result in results] == [1.0, 1.0]


def test_variable_beside_one_in_replica_context_is_refused(pair) -> None:
    with pair.scope():
        variable = sg.Variable(1.0)

    def step():
        with pair.extended.colocate_vars_with(variable):
            pass

    with pytest.raises(RuntimeError, match="in replica context"):
        pair.run(step)
