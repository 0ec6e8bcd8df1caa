"""Gradients that are the same for all replicas update every copy as one device would."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.variables.layouts import is_remote
from tests.contract.parts import split

_START = np.asarray([1.0, -2.0, 3.0, 0.5], "float32")
_GRADIENT = np.asarray([3.0, 0.5, -1.0, 4.0], "float32")


def _with_momentum(num_steps: int) -> np.ndarray:
    weight, velocity = _START, np.zeros_like(_START)
    for _ in range(num_steps):
        velocity = 0.9 * velocity - 0.1 * _GRADIENT
        weight = weight + velocity
    return weight


def _made(strategy: sg.Strategy) -> tuple[Any, Any]:
    with strategy.scope():
        return keras.Variable(_START), keras.optimizers.SGD(0.1, momentum=0.9)


def _seen_by_replicas(strategy: sg.Strategy, weight: Any) -> list[np.ndarray]:
    result = strategy.run(lambda: weight.value + 0.0)
    return [np.asarray(part) for part in strategy.local_results(result)]


@pytest.mark.parametrize("method", ["apply", "apply_gradients", "sg.apply_gradients"])
def test_plain_gradients_outside_the_replicas_update_all_copies(
    strategy: sg.Strategy, method: str
) -> None:
    weight, optimizer = _made(strategy)
    for num_steps in (1, 2):
        with strategy.scope():
            if method == "apply":
                optimizer.apply([jnp.asarray(_GRADIENT)], [weight])
            elif method == "apply_gradients":
                optimizer.apply_gradients([(_GRADIENT, weight)])
            else:
                sg.apply_gradients(optimizer, [(_GRADIENT, weight)])
        for seen in _seen_by_replicas(strategy, weight):
            np.testing.assert_allclose(seen, _with_momentum(num_steps), rtol=1e-5)
    assert int(optimizer.iterations) == 2


def test_the_first_update_outside_the_scope_makes_the_optimizer_in_it(
    strategy: sg.Strategy,
) -> None:
    weight, optimizer = _made(strategy)
    optimizer.apply([jnp.asarray(_GRADIENT)], [weight])
    strategy.run(lambda: optimizer.apply([jnp.asarray(_GRADIENT) / _count(strategy)], [weight]))
    np.testing.assert_allclose(np.asarray(weight), _with_momentum(2), rtol=1e-5)


def _count(strategy: sg.Strategy) -> int:
    return strategy.num_replicas_in_sync


def test_accumulated_gradients_outside_the_replicas_are_their_mean(strategy: sg.Strategy) -> None:
    with strategy.scope():
        weight = keras.Variable(_START)
        optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
        for factor, wanted in ((1.0, _START), (3.0, _START - 0.2 * _GRADIENT)):
            optimizer.apply([jnp.asarray(_GRADIENT) * factor], [weight])
            np.testing.assert_allclose(np.asarray(weight), wanted, rtol=1e-5)


def test_branch_outside_the_replicas_reads_variables(strategy: sg.Strategy) -> None:
    with strategy.scope():
        weight, scale = keras.Variable(_START), keras.Variable(2.0)
        double = jax.lax.cond(
            scale.value > 1.0, lambda: weight.value * scale.value, lambda: weight.value
        )
    np.testing.assert_allclose(np.asarray(double), 2.0 * _START, rtol=1e-6)


def test_plain_gradients_in_a_compiled_function_update_all_copies(strategy: sg.Strategy) -> None:
    weight, optimizer = _made(strategy)
    with strategy.scope():
        optimizer.build([weight])

    @sg.function
    def step(gradient: Any) -> None:
        optimizer.apply([gradient], [weight])

    for num_steps in (1, 2):
        step(jnp.asarray(_GRADIENT))
        np.testing.assert_allclose(np.asarray(weight), _with_momentum(num_steps), rtol=1e-5)


def test_plain_gradients_in_merge_call_update_all_copies(strategy: sg.Strategy) -> None:
    weight, optimizer = _made(strategy)
    with strategy.scope():
        optimizer.build([weight])

    def merged(_: sg.Strategy) -> None:
        optimizer.apply([jnp.asarray(_GRADIENT)], [weight])

    def step() -> None:
        sg.get_replica_context().merge_call(merged)

    if is_remote(weight):
        with pytest.raises(NotImplementedError, match="apply in the replica function; it sums"):
            strategy.run(step)
        return
    strategy.run(step)
    np.testing.assert_allclose(np.asarray(weight), _with_momentum(1), rtol=1e-5)


def test_stateless_apply_outside_the_replicas_is_that_of_one_device(strategy: sg.Strategy) -> None:
    weight, optimizer = _made(strategy)
    with strategy.scope():
        optimizer.build([weight])
        state = [variable.value for variable in optimizer.variables]
        update = jax.jit(optimizer.stateless_apply)
        (value,), _ = update(state, [jnp.asarray(_GRADIENT)], [weight.value])
    np.testing.assert_allclose(np.asarray(value), _with_momentum(1), rtol=1e-5)


def test_gradients_of_single_replicas_are_refused_outside_of_them(
    distributing: sg.Strategy,
) -> None:
    weight, optimizer = _made(distributing)
    parts = split(distributing, lambda index: _GRADIENT * index)
    with (
        distributing.scope(),
        pytest.raises(
            RuntimeError, match=r"received PerReplica gradients[\s\S]*reduce the gradients"
        ),
    ):
        optimizer.apply([parts], [weight])
    np.testing.assert_array_equal(np.asarray(weight), _START)
