"""Several optimizers whose variables are on the same parameter servers."""

from __future__ import annotations

import gc
from typing import Any

import keras
import numpy as np
import pytest

import stratagem as sg
from tests.unit.parameter_server.clusters import coordinated
from tests.unit.parameter_server.keras.trained_models import (
    NUM_STEPS,
    X,
    Y,
    assert_same,
    dense_model,
    gradients_of,
)

pytestmark = []

optimizers = keras.optimizers


@pytest.mark.slow
def test_model_that_is_compiled_again_begins_with_a_new_optimizer() -> None:
    x, y = np.concatenate(X), np.concatenate(Y)
    fitted: dict[str, Any] = {"batch_size": 40, "epochs": 2, "shuffle": False, "verbose": 0}

    def fit(model: Any) -> Any:
        model.compile(optimizers.Adam(0.05), "mse")
        model.fit(x, y, **fitted)
        model.layers[0].trainable = False
        model.compile(optimizers.Adam(0.01), "mse")
        assert int(model.optimizer.iterations) == 0
        return model.fit(x, y, **fitted).history

    alone = dense_model()
    expected = fit(alone)
    with coordinated() as coordinator:
        with coordinator.strategy.scope():
            model = dense_model()
            np.testing.assert_allclose(fit(model)["loss"], expected["loss"], rtol=1e-5)
        assert_same(model.variables, alone.variables)
        assert_same(model.optimizer.variables, alone.optimizer.variables)


def test_two_optimizers_in_one_step_train_their_own_variables() -> None:
    def make() -> tuple[Any, Any, Any]:
        model = dense_model()
        return model, optimizers.Adam(0.05), optimizers.SGD(0.1, momentum=0.9)

    def train_both(strategy: Any, model: Any, first: Any, second: Any, x: Any, y: Any) -> Any:
        def step() -> Any:
            loss, grads = gradients_of(model, x, y)
            variables = model.trainable_variables
            first.apply(grads[:2], variables[:2])
            second.apply(grads[2:], variables[2:])
            return loss

        return strategy.run(step)

    local = sg.OneDeviceStrategy("cpu:0")
    with local.scope():
        alone = make()
        for optimizer, part in zip(alone[1:], (slice(2), slice(2, 4)), strict=True):
            optimizer.build(alone[0].trainable_variables[part])
    with coordinated() as coordinator:
        with coordinator.strategy.scope():
            served = make()
            for optimizer, part in zip(served[1:], (slice(2), slice(2, 4)), strict=True):
                optimizer.build(served[0].trainable_variables[part])

        def function(x: Any, y: Any) -> Any:
            return train_both(sg.get_strategy(), *served, x, y)

        for x, y in zip(X, Y, strict=True):
            loss = coordinator.schedule(function, args=(x, y)).fetch()
            np.testing.assert_allclose(loss, train_both(local, *alone, x, y), rtol=1e-4)
        for one, other in zip(served, alone, strict=True):
            assert_same(one.variables, other.variables)
        assert int(served[1].iterations) == int(served[2].iterations) == NUM_STEPS


@pytest.mark.slow
def test_models_one_after_the_other_do_not_fill_the_servers_with_optimizers() -> None:
    x, y = np.concatenate(X), np.concatenate(Y)
    with coordinated() as coordinator, coordinator.strategy.scope():
        model = dense_model()
        for number in range(1, 4):
            model.compile(optimizers.Adam(0.05), "mse")
            gc.collect()
            model.fit(x, y, batch_size=40, verbose=0)
            name = "adam" if number == 1 else f"adam_{number}"
            kept = set(coordinator.strategy.placement.remote.variables.client.scalars())
            assert kept == {f"{name}.iteration", f"{name}.learning_rate"}
            assert int(model.optimizer.iterations) == 1
