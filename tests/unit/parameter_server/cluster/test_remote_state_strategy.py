"""A strategy whose variables are on servers: how its steps run."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem as sg
from tests.unit.parameter_server.clusters import coordinated


def test_steps_that_run_op_by_op_are_refused() -> None:
    with coordinated() as coordinator:
        with coordinator.strategy.scope():
            v = sg.Variable(np.zeros(2, "float32"))

        def function(is_eager: bool) -> None:
            sg.config.run_eagerly(is_eager)
            try:
                sg.get_strategy().run(lambda: v.assign_add(jnp.ones(2)))
            finally:
                sg.config.run_eagerly(False)

        coordinator.schedule(function, args=(True,))
        with pytest.raises(
            RuntimeError, match="Cannot run a step of a ParameterServerStrategy op by op"
        ):
            coordinator.join()
        coordinator.schedule(function, args=(False,)).fetch()
        assert np.asarray(v.value).tolist() == [1, 1]


def test_many_steps_are_as_many_single_ones() -> None:
    batches = [np.full(2, i, "float32") for i in range(5)]
    with coordinated() as coordinator:
        with coordinator.strategy.scope():
            v = sg.Variable(np.zeros(2, "float32"))
            optimizer = keras.optimizers.SGD(1.0)
            optimizer.build([v])

        def step(batch: Any) -> Any:
            before = jnp.sum(v.value)
            optimizer.apply([batch], [v])
            return before - jnp.sum(batch)

        def function() -> Any:
            strategy = sg.get_strategy()
            iterator = iter(strategy.distribute_dataset(batches))
            return [strategy.run_steps(step, iterator, count) for count in (3, 2)]

        first, second = coordinator.schedule(function).fetch()
        # Of each step the values before it: minus twice the sum of the batches before.
        assert first.tolist() == [0, -2, -6]
        assert second.tolist() == [-12, -20]
        assert np.asarray(v.value).tolist() == [-10, -10]
