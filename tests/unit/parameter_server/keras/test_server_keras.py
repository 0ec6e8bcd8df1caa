"""Variables that a step creates under placement rules, compared with NumPy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.variables.store import is_remote
from tests.unit.parameter_server.clusters import ThreadCluster

MAKER = "stratagem.parameter_server.strategy.hybrid.start_cluster"
RATE = 0.1


@pytest.fixture(params=[1, 2])
def strategy(request: pytest.FixtureRequest) -> Iterator[sg.HybridStrategy]:
    devices = [f"cpu:{index}" for index in range(request.param)]
    with mock.patch(MAKER, lambda plan: ThreadCluster(plan.num_servers, [])):
        made = sg.HybridStrategy(devices, placement={"remote": "server"}, num_servers=1)
    with contextlib.closing(made):
        yield made


@pytest.mark.parametrize("is_eager", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_model_built_in_its_first_step_is_updated_once_a_step(strategy, is_eager) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4, 3)).astype("float32")
    y = rng.normal(size=(4, 1)).astype("float32")
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.layers.Dense(2, use_bias=False, kernel_initializer="ones", name="remote"),
                keras.layers.Dense(1, use_bias=False, kernel_initializer="ones", name="local"),
            ]
        )
        optimizer = keras.optimizers.SGD(RATE)

    def step(batch: Any) -> Any:
        if not model.built:
            model.build(batch[0].shape)

        def loss() -> Any:
            return sg.compute_average_loss(jnp.square(model(batch[0]) - batch[1])[:, 0])

        value, grads = sg.value_and_grad(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        return value

    first, second = np.ones((3, 2)), np.ones((2, 1))
    batches = strategy.distribute_dataset(sg.input.Dataset((x, y), batch_size=4).repeat(3))
    sg.config.run_eagerly(is_eager)
    try:
        for batch in batches:
            loss = strategy.reduce("sum", strategy.run(step, args=(batch,)), axis=None)
            error = x @ first @ second - y
            np.testing.assert_allclose(float(loss), np.mean(error**2), rtol=1e-5)
            outer = 2 * error / len(x)
            grads = x.T @ outer @ second.T, (x @ first).T @ outer
            first, second = first - RATE * grads[0], second - RATE * grads[1]
    finally:
        sg.config.run_eagerly(False)
    assert [is_remote(variable) for variable in model.variables] == [True, False]
    for variable, expected in zip(model.variables, (first, second), strict=True):
        np.testing.assert_allclose(variable.numpy(), expected, rtol=1e-5)
