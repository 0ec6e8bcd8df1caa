"""What may be assigned to a variable: other kinds of values, other dtypes, and in steps that fail.

What assignments of replicas add up to stands in the contract suite.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import stratagem as sg
from tests.contract.parts import contribution
from tests.parity.comparison import mirrored
from tests.unit.keras.replicas import components_of, copies_of, per_replica


@pytest.mark.parametrize(
    ("aggregation", "assigned"), [("sum", 3.0), ("mean", 1.5), ("only_first_replica", 1.0)]
)
def test_per_replica_assigned_outside_to_on_read_is_aggregated(
    aggregation: str, assigned: float
) -> None:
    strategy = mirrored(2)
    value = per_replica(strategy, [np.float32(1), np.float32(2)])
    with strategy.scope():
        variable = sg.Variable(10.0, synchronization="on_read", aggregation=aggregation)
    variable.assign(value)
    assert float(variable.value) == assigned


@pytest.mark.parametrize("synchronization", ["on_write", "on_read"])
def test_mirrored_value_is_assigned_as_it_is(synchronization: str) -> None:
    strategy = mirrored(2)
    with strategy.scope():
        variable = sg.Variable(10.0, synchronization=synchronization, aggregation="sum")
        variable.assign(sg.Mirrored(jnp.asarray(4.0)))
    assert float(variable.value) == 4.0


def test_value_of_another_shape_is_refused() -> None:
    with mirrored(2).scope():
        variable = sg.Variable([1.0, 2.0])
        with pytest.raises(ValueError, match="must match"):
            variable.assign([1.0, 2.0, 3.0])
    np.testing.assert_array_equal(np.asarray(variable), [1.0, 2.0])


def test_value_is_cast_to_the_dtype_of_the_variable(execution: str) -> None:
    strategy = mirrored(2)
    with strategy.scope():
        half = sg.Variable(1.0, dtype="bfloat16", aggregation="mean")
        own = sg.Variable(0, synchronization="on_read", aggregation="sum")
    strategy.run(lambda: (half.assign(contribution()), own.assign(contribution())))
    assert (half.dtype, float(half.value)) == ("bfloat16", 1.5)
    assert (own.dtype, components_of(own)) == ("int32", [1, 2])


def test_assignment_leaves_equal_copies_on_all_devices(execution: str) -> None:
    strategy = mirrored(3)
    with strategy.scope():
        variable = sg.Variable([10.0, 10.0], aggregation="sum")
    strategy.run(lambda: variable.assign_add(jnp.full(2, contribution())))
    assert [copy.tolist() for copy in copies_of(variable)] == [[16.0, 16.0]] * 3
    variable.assign([1.0, 2.0])
    assert [copy.tolist() for copy in copies_of(variable)] == [[1.0, 2.0]] * 3


def test_failed_step_assigns_nothing(execution: str) -> None:
    strategy = mirrored(2)
    with strategy.scope():
        variable = sg.Variable(10.0, aggregation="sum")

    def step() -> None:
        variable.assign_add(jnp.asarray(1.0))
        raise KeyError("lost")

    with pytest.raises(KeyError, match="lost"):
        strategy.run(step)
    assert float(variable.value) == 10.0


def test_variable_of_no_strategy_cannot_take_a_value_that_differs(execution: str) -> None:
    variable: Any = sg.Variable(10.0, name="outside")
    with pytest.raises(ValueError, match="outside"):
        mirrored(2).run(lambda: variable.assign(contribution()))
    assert float(variable.value) == 10.0


@pytest.mark.parametrize("devices", [["cpu:0"], ["cpu:0", "cpu:1"]], ids=len)
def test_assigned_arrays_are_not_shared(devices) -> None:
    """A step donates the buffers of the variables that it writes."""
    strategy = sg.MirroredStrategy(devices)
    with strategy.scope():
        online, target = sg.Variable([0.0, 1.0]), sg.Variable([0.0, 0.0])

    def train() -> None:
        online.assign_add([1.0, 1.0])

    def train_both() -> None:
        online.assign_add([1.0, 1.0])
        target.assign_add([10.0, 10.0])

    given = jnp.array([5.0, 6.0])
    online.assign(given)
    strategy.run(train)
    np.testing.assert_array_equal(given, [5.0, 6.0])
    for value_of in (lambda: online, lambda: online.value):
        target.assign(value_of())
        strategy.run(train)
        np.testing.assert_array_equal(target.value + 1, online.value)
        target.assign(value_of())
        strategy.run(train_both)
        np.testing.assert_array_equal(target.value - 9, online.value)


@pytest.mark.parametrize("devices", [["cpu:0"], ["cpu:0", "cpu:1"]], ids=len)
def test_initial_arrays_are_not_shared(devices) -> None:
    strategy = sg.MirroredStrategy(devices)
    given = jnp.array([5.0, 6.0])
    with strategy.scope():
        first = sg.Variable(given)
        second, third = sg.Variable(first), sg.Variable(first.value)

    def train() -> None:
        for one in (first, second, third):
            one.assign_add([1.0, 1.0])

    for _ in range(2):
        strategy.run(train)
    for one in (first, second, third):
        np.testing.assert_array_equal(one.value - 2, given)
