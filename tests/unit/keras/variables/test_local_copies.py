"""Local copies: what a variable stands for in a training step, and outside."""

from __future__ import annotations

import keras
import numpy as np

import stratagem as sg
from stratagem.execution.tracing.functionalize import on_global_model


def test_variable_stands_for_its_copy_in_a_replica_function_only() -> None:
    strategy = sg.LocalUpdateStrategy(devices=["cpu:0", "cpu:1"])
    with strategy.scope():
        variable = keras.Variable(1.0)
        optimizer = keras.optimizers.SGD()
        optimizer.build([variable])
    ids = sg.PerReplica(stacked=np.array([10.0, 20.0], "float32"))

    def assign(value):
        variable.assign(value)
        with on_global_model():
            whole = variable.value + 0.0
        return variable.value + 0.0, whole

    own, whole = strategy.run(assign, args=(ids,))
    assert [float(one) for one in strategy.local_results(own)] == [10.0, 20.0]
    assert [float(one) for one in strategy.local_results(whole)] == [1.0, 1.0]
    assert float(variable.value) == 1.0
    np.testing.assert_array_equal(variable.local_copy.storage, [10.0, 20.0])
    variable.assign(5.0)
    np.testing.assert_array_equal(variable.local_copy.storage, [5.0, 5.0])


def test_variable_without_an_optimizer_has_no_copy() -> None:
    with sg.LocalUpdateStrategy(devices=["cpu:0", "cpu:1"]).scope():
        variable = keras.Variable(1.0)
    assert variable.local_copy is None
    assert not variable.outer_state
