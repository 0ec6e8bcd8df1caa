"""`VariableValues`: the same inputs and outputs as the variables give one by one."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.devices.mesh import Topology
from stratagem.execution.programs import variable_values as module
from stratagem.execution.programs.variable_values import VariableValues, value_for_step

TOPOLOGY = Topology(tuple(jax.devices()[:2]))


def made(count: int, **options: Any) -> list[Any]:
    return [keras.Variable(np.float32(index), **options) for index in range(count)]


def test_copies_are_read_and_replaced_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    with sg.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        variables = [*made(2), *made(1, synchronization="on_read", aggregation="sum")]
    wanted = [*map(value_for_step, variables)]
    values = VariableValues(variables, TOPOLOGY)
    monkeypatch.setattr(module.Destination, "store", None)  # would take a call for each
    got = values.read(None)  # pyright: ignore[reportArgumentType]
    assert all(one is other for one, other in zip(got, wanted, strict=True))
    values.replace([value + 1 for value in got])
    for variable, before in zip(variables, wanted, strict=True):
        np.testing.assert_array_equal(variable.storage, before + 1)
    with pytest.raises(ValueError, match="zip"):
        values.replace(got[:1])


def test_variables_elsewhere_are_asked_one_by_one() -> None:
    outside = made(1)
    with sg.CentralStorageStrategy(["cpu:0", "cpu:1"]).scope():
        central = made(1)
    for variables in (outside, central, [*outside, *central]):
        values = VariableValues(variables, TOPOLOGY)
        assert values.read(lambda _: "asked") == ["asked"] * len(variables)
        values.replace([jnp.float32(5)] * len(variables))
        assert [float(variable.value) for variable in variables] == [5] * len(variables)


def test_step_inside_a_function_sees_the_values_of_its_trace() -> None:
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        (variable,) = made(1)

    def step() -> Any:
        variable.assign_add(1.0)
        return variable.value

    @sg.function
    def twice() -> Any:
        strategy.run(step)
        return strategy.run(step)

    strategy.run(step)  # the program may be shared
    assert [float(part) for part in twice().components] == [3, 3]
    assert float(variable.value) == 3
