"""What a build assigns to the variables that it creates, where a step is the first to build."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import keras
import numpy as np

import stratagem as sg
from tests.contract.parts import assert_parts, contribution, seldom_eager

_FIRST = np.array([1.0, -2.0], "float32")
_GRADIENT = np.array([0.5, 0.25], "float32")
_NUM_STEPS = 2


class _Counting(keras.layers.Layer):
    """A layer that assigns when it is built and whenever it is called."""

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(2,), initializer="ones", name="scale")
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False, name="calls")
        self.scale.assign(self.scale * 3.0)
        self.calls.assign(10.0)

    def call(self, x: Any) -> Any:
        self.calls.assign_add(1.0)
        return x * self.scale


def _schedule_free() -> keras.optimizers.Optimizer:
    """Its build copies the weights into a slot, which the update starts from."""
    return keras.optimizers.ScheduleFreeAdamW(0.05, warmup_steps=2)


@functools.cache
def _by_keras() -> Any:
    weight = keras.Variable(_FIRST)
    optimizer = _schedule_free()
    for _ in range(_NUM_STEPS):
        optimizer.apply([jnp.asarray(_GRADIENT)], [weight])
    return np.asarray(weight)


@seldom_eager
def test_optimizer_that_copies_weights_is_built_by_its_first_step(strategy, execution) -> None:
    n = strategy.num_replicas_in_sync
    with strategy.scope():
        weight = sg.Variable(_FIRST)
        optimizer = _schedule_free()
    for _ in range(_NUM_STEPS):
        strategy.run(lambda: optimizer.apply([_GRADIENT / n], [weight]))
    np.testing.assert_allclose(weight.value, _by_keras(), rtol=1e-5)


@seldom_eager
def test_layer_that_assigns_is_built_in_a_loss(strategy, execution) -> None:
    with strategy.scope():
        layer = _Counting()
        total = sg.Variable(0.0, aggregation="sum")

    def step() -> Any:
        total.assign_add(contribution())  # is made once, however often the step is traced
        loss, _ = sg.value_and_grad(lambda: jnp.sum(layer(jnp.ones((1, 2)))), [total])
        return loss, layer.scale, layer.calls

    n = strategy.num_replicas_in_sync
    for number in range(1, 4):
        loss, scale, calls = strategy.run(step)
        assert_parts(strategy, loss, lambda _: 6.0)
        assert_parts(strategy, scale, lambda _: [3.0, 3.0])
        assert_parts(strategy, calls, lambda _, k=number: 10.0 + k)
        np.testing.assert_allclose(total.value, number * n * (n + 1) / 2)


def test_values_that_follow_from_the_arguments(strategy, execution) -> None:
    made: list[Any] = []

    def step(x: Any) -> Any:
        if not made:
            made.append(sg.Variable(0.0, synchronization="on_read", aggregation="sum"))
            made[0].assign(2.0 * x)
        made[0].assign_add(1.0)
        return made

    with strategy.scope():
        for number in range(1, 3):
            (parts,) = strategy.run(step, args=(5.0,))
            assert_parts(strategy, parts, lambda _, k=number: 10.0 + k)


@seldom_eager
def test_function_keeps_what_a_build_assigns(strategy, execution) -> None:
    n = strategy.num_replicas_in_sync
    with strategy.scope():
        weight = sg.Variable(_FIRST)
        optimizer = _schedule_free()

    @sg.function
    def step() -> Any:
        strategy.run(lambda: optimizer.apply([_GRADIENT / n], [weight]))
        return weight

    for _ in range(_NUM_STEPS):
        last = step()
    np.testing.assert_allclose(last, _by_keras(), rtol=1e-5)
