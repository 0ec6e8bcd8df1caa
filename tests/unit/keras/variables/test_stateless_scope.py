"""Hand-written steps of pure JAX in a strategy's scope: the numbers of plain Keras."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem as sg

_X = np.random.default_rng(0).normal(size=(8, 3)).astype("float32")
_Y = _X.sum(1, keepdims=True)


def _multi_optimizer() -> Any:
    by_path = {".*kernel": keras.optimizers.Adam(0.05)}
    sgd = keras.optimizers.SGD(0.1, momentum=0.9)
    return keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(sgd, by_path))


def _loss_scale() -> Any:
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=2.0)


def _unchanged(step: Any) -> Any:
    return step


def _values(variables: Any) -> list[Any]:
    return [variable.value for variable in variables]


def _trained(make_optimizer: Callable[[], Any], transform: Callable[..., Any]) -> list[Any]:
    """The state after three steps in the manner of Keras's guide for JAX."""
    keras.utils.set_random_seed(0)
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((3,)),
            layers.Dense(4),
            layers.BatchNormalization(),
            layers.Dropout(0.3, seed=1),
            layers.Dense(1),
        ]
    )
    optimizer = make_optimizer()
    optimizer.build(model.trainable_variables)
    error, mean = keras.metrics.MeanSquaredError(), keras.metrics.Mean()

    def loss(trainable: Any, others: Any) -> Any:
        predicted, others = model.stateless_call(trainable, others, _X, training=True)
        return jnp.mean(jnp.square(predicted - _Y)), (others, predicted)

    def step(state: Any) -> Any:
        trainable, others, slots, of_error, of_mean = state
        (value, (others, predicted)), grads = jax.value_and_grad(loss, has_aux=True)(
            trainable, others
        )
        trainable, slots = optimizer.stateless_apply(slots, grads, trainable)
        of_error = error.stateless_update_state(of_error, _Y, predicted)
        return trainable, others, slots, of_error, mean.stateless_update_state(of_mean, value)

    of_model = _values(model.trainable_variables), _values(model.non_trainable_variables)
    state = (*of_model, *map(_values, (optimizer.variables, error.variables, mean.variables)))
    for _ in range(3):
        state = transform(step)(state)
    results = error.stateless_result(state[3]), mean.stateless_result(state[4])
    return [np.asarray(leaf) for leaf in jax.tree.leaves((state, results))]


@pytest.mark.parametrize(
    ("make_optimizer", "transform", "make_strategy"),
    [
        (_multi_optimizer, jax.jit, sg.MirroredStrategy),
        pytest.param(_multi_optimizer, _unchanged, sg.MirroredStrategy, marks=pytest.mark.slow),
        pytest.param(_loss_scale, jax.jit, sg.MirroredStrategy, marks=pytest.mark.slow),
        pytest.param(_multi_optimizer, jax.jit, sg.CentralStorageStrategy, marks=pytest.mark.slow),
    ],
)
def test_stateless_steps_in_a_scope_are_those_of_keras(
    make_optimizer, transform, make_strategy
) -> None:
    expected = _trained(make_optimizer, jax.jit)
    with make_strategy(["cpu:0", "cpu:1"]).scope():
        got = _trained(make_optimizer, transform)
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_apply_in_a_stateless_scope_changes_nothing_outside() -> None:
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        weight = keras.Variable(1.0)
        total = keras.Variable(1.0, trainable=False, synchronization="on_read", aggregation="sum")
        optimizer = keras.optimizers.SGD(0.5)
        optimizer.build([weight])

        def step(given: Any) -> Any:
            scope = keras.StatelessScope(state_mapping=[(weight, given), (total, 2 * given)])
            with scope:
                optimizer.apply([jnp.ones(())], [weight])
                total.assign_add(1.0)
                return weight.value, total.value, total + 1.0

        for call in (step, jax.jit(step)):
            np.testing.assert_allclose(call(jnp.float32(4.0)), [3.5, 9.0, 10.0])
    assert (float(weight.value), float(total.value), int(optimizer.iterations.value)) == (1, 2, 0)


def test_variable_with_a_value_in_a_stateless_scope_is_refused_as_by_keras() -> None:
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope(), keras.StatelessScope():
        with pytest.raises(ValueError, match="create a variable while in a stateless scope"):
            keras.Variable(initializer=0)
        with pytest.raises(ValueError, match="create a variable while in a stateless scope"):
            keras.Variable(np.zeros(2, "float32"))
    made: list[Any] = []  # in a step a value may be given

    def step() -> Any:
        made.extend([] if made else [keras.Variable(initializer=0)])
        return made[0]

    with strategy.scope():
        assert [int(part) for part in strategy.run(step).components] == [0, 0]
