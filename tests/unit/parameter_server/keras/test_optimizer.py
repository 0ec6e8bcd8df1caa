"""Optimizers whose variables are on servers: how they are built, and what they refuse."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.parameter_server.client.variable_client import Scalar
from tests.unit.parameter_server.clusters import coordinated
from tests.unit.parameter_server.keras.trained_models import (
    NUM_STEPS,
    X,
    Y,
    dense_model,
    gradients_of,
)

optimizers = keras.optimizers


# Optimizers that are built in different places


@pytest.mark.slow
def test_optimizer_that_a_worker_builds_is_built_here_too() -> None:
    with coordinated(num_workers=2) as coordinator:
        with coordinator.strategy.scope():
            model, optimizer = dense_model(), optimizers.Adam(0.05)
        assert not optimizer.built
        assert float(optimizer.learning_rate.value) == pytest.approx(0.05)
        optimizer.learning_rate = 0.01

        def train(x: Any, y: Any) -> None:
            _, gradients = gradients_of(model, x, y)
            optimizer.apply(gradients, model.trainable_variables)

        def step(x: Any, y: Any) -> None:
            def run(x: Any, y: Any) -> None:
                sg.get_strategy().run(train, args=(x, y))

            coordinator.schedule(run, args=(x, y)).fetch()

        for x, y in zip(X, Y, strict=True):
            step(x, y)
        assert optimizer.built
        assert int(optimizer.iterations.value) == NUM_STEPS
        assert isinstance(optimizer.iterations.place, Scalar)
        assert len(optimizer.variables) == 2 + 2 * len(model.trainable_variables)
        moment = optimizer.variables[2].numpy()
        assert moment.shape == model.layers[0].kernel.shape
        assert moment.any()
        assert float(optimizer.learning_rate.value) == pytest.approx(0.01)
        assert optimizer.get_config()["learning_rate"] == pytest.approx(0.01)
        # And what is assigned here is there.
        optimizer.variables[2].assign(np.zeros_like(moment))
        optimizer.learning_rate = 0.0
        before = [v.numpy() for v in model.trainable_variables]
        step(X[0], Y[0])
        for one, other in zip(model.trainable_variables, before, strict=True):
            np.testing.assert_array_equal(one.numpy(), other)
        assert int(optimizer.iterations.value) == NUM_STEPS + 1


@pytest.mark.compatibility
def test_updates_are_counted_wherever_the_variables_are() -> None:
    with coordinated(num_servers=3) as coordinator:
        with coordinator.strategy.scope():
            sg.Variable(np.zeros(2, "float32"), trainable=False)  # the only one of its server
            v = sg.Variable(np.zeros(2, "float32"))
            optimizer = optimizers.SGD(1.0)

        def step() -> None:
            optimizer.apply([jnp.ones(2)], [v])

        for _ in range(3):
            coordinator.schedule(lambda: sg.get_strategy().run(step)).fetch()
        assert int(optimizer.iterations.value) == 3
        assert v.numpy().tolist() == [-3, -3]


# Parts of the variables


def test_variables_without_a_gradient_are_left_alone() -> None:
    with coordinated() as coordinator:
        with coordinator.strategy.scope():
            v, w = (sg.Variable(np.ones(2, "float32")) for _ in range(2))
            optimizer = optimizers.SGD(1.0, momentum=0.5)
            optimizer.build([v, w])

        def step(*grads: Any) -> None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Keras says which have none
                optimizer.apply(list(grads), [v, w])

        def function(*grads: Any) -> None:
            sg.get_strategy().run(step, args=grads)

        ones = np.ones(2, "float32")
        coordinator.schedule(function, args=(ones, ones)).fetch()
        coordinator.schedule(function, args=(ones, None)).fetch()
        assert v.numpy().tolist() == [-1.5, -1.5]
        assert w.numpy().tolist() == [0, 0]
        coordinator.schedule(function, args=(None, None))
        with pytest.raises(ValueError, match="No gradients provided for any variable"):
            coordinator.join()
        coordinator.schedule(lambda: sg.get_strategy().run(lambda: optimizer.apply([], [])))
        coordinator.join()
        assert int(optimizer.iterations.value) == 2


def test_gradients_that_are_reduced_already_are_not_summed_again() -> None:
    with coordinated(devices_per_worker=2) as coordinator:
        with coordinator.strategy.scope():
            v = sg.Variable(np.zeros(2, "float32"))
            optimizer = optimizers.SGD(1.0)
            optimizer.build([v])

        def step() -> None:
            grad = sg.get_replica_context().all_reduce("mean", jnp.full(2, 3.0))
            sg.apply_gradients(optimizer, [(grad, v)], skip_gradients_aggregation=True)

        coordinator.schedule(lambda: sg.get_strategy().run(step)).fetch()
        assert v.numpy().tolist() == [-3, -3]


@pytest.mark.parametrize("is_in_scope", [True, False])
def test_plain_gradients_at_the_coordinator_update_what_servers_hold(is_in_scope: bool) -> None:
    with coordinated(num_servers=2) as coordinator:
        scope = coordinator.strategy.scope
        with scope():
            v = keras.Variable(np.arange(4.0, dtype="float32"))
            optimizer = optimizers.SGD(0.5, momentum=0.5)
        for _ in range(2):
            with scope() if is_in_scope else contextlib.nullcontext():
                optimizer.apply([jnp.ones(4)], [v])
        assert np.asarray(v).tolist() == [-1.25, -0.25, 0.75, 1.75]
        assert int(optimizer.iterations) == 2


# What is refused


def _plain(optimizer: Any, v: Any, w: Any) -> None:
    optimizer.apply([jnp.ones((2, 3))], [v])


def _of_another(optimizer: Any, v: Any, w: Any) -> None:
    _plain(optimizer, v, w)
    _plain(optimizer, w, v)


def _in_a_loop(optimizer: Any, v: Any, w: Any) -> None:
    optimizer.build([v, w])

    def update(count: Any, _: Any) -> Any:
        optimizer.apply([jnp.ones((2, 3)), jnp.ones((2, 3))], [v, w])
        return count, None

    jax.lax.scan(update, 0, length=2)


@pytest.mark.parametrize(
    ("make", "step", "error", "words"),
    [
        (
            lambda: optimizers.SGD(clipnorm=1.0, gradient_accumulation_steps=2),
            _plain,
            NotImplementedError,
            "accumulates gradients and clips their norm",
        ),
        (
            lambda: optimizers.LossScaleOptimizer(optimizers.SGD()),
            _plain,
            RuntimeError,
            r"was built in a function on a worker[\s\S]*build\(variables\) before",
        ),
        (optimizers.SGD, _of_another, ValueError, "but was not built for them"),
        (optimizers.SGD, _in_a_loop, ValueError, "was applied inside lax.cond"),
    ],
    ids=["accumulates and clips", "scales", "not built for it", "loop"],
)
def test_update_that_servers_cannot_make_is_refused(make, step, error, words) -> None:
    with coordinated() as coordinator:
        with coordinator.strategy.scope():
            v, w = (sg.Variable(np.ones((2, 3), "float32")) for _ in range(2))
            optimizer = make()
        coordinator.schedule(lambda: sg.get_strategy().run(lambda: step(optimizer, v, w)))
        with pytest.raises(error, match=words):
            coordinator.join()


def test_optimizer_with_arrays_of_other_shapes_is_refused() -> None:
    with coordinated() as coordinator:
        with coordinator.strategy.scope():
            v = sg.Variable(np.ones((2, 3), "float32"))
            optimizer = optimizers.Adafactor()
            optimizer.build([v])
        with pytest.raises(NotImplementedError, match="whose shapes do not match its variables"):
            coordinator.schedule(lambda: optimizer.apply([np.ones((2, 3))], [v]))
