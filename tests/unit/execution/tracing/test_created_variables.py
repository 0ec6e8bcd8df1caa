"""Variables that are created in a trace: no value, a stand-in, and a value after it."""

from __future__ import annotations

import keras
import numpy as np

import stratagem as sg
from stratagem.execution.tracing.functionalize import (
    initialize_created_variables,
    is_uninitialized,
    stand_in,
)


def test_variable_of_a_scope_has_a_stand_in_and_then_its_value() -> None:
    with keras.StatelessScope():
        variable = keras.Variable(lambda shape, dtype: np.full(shape, 3, dtype), shape=(2,))
        assert is_uninitialized(variable)
        np.testing.assert_array_equal(stand_in(variable), [3, 3])
    assert not is_uninitialized(variable)
    assert stand_in(variable) is None
    np.testing.assert_array_equal(variable.value, [3, 3])


def test_object_that_reports_its_value_is_asked() -> None:
    class Remote:
        has_value = False
        _value = "a cached value"

    assert is_uninitialized(Remote())
    Remote.has_value = True
    assert not is_uninitialized(Remote())


def test_strategy_initializes_what_its_replicas_created() -> None:
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope(), keras.StatelessScope():
        variable = keras.Variable("ones", shape=(2,))
    initialize_created_variables(strategy)
    assert strategy.variables.uninitialized() == []
    np.testing.assert_array_equal(variable.value, [1, 1])
