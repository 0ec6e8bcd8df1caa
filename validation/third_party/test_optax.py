"""Optax: gradients are summed over replicas, its optimizers see what one device would."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from validation.third_party.regression_problem import (
    NUM_FEATURES,
    Reductions,
    assert_like_plain_jax,
)

_OPTIMIZERS = {
    "adamw with clipping and a schedule": lambda: optax.chain(
        optax.clip_by_global_norm(0.5),
        optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 0.05, 2, 10), eps=1e-3),
    ),
    "lamb": lambda: optax.lamb(0.05, eps=1e-3),
    "adafactor": lambda: optax.adafactor(0.05, min_dim_size_to_factor=2),
    "averaged updates": lambda: optax.chain(optax.sgd(0.05, momentum=0.9), optax.ema(0.9)),
    "schedule free": lambda: optax.contrib.schedule_free_sgd(0.05, warmup_steps=2),
    "injected hyperparameters": lambda: optax.inject_hyperparams(optax.rmsprop)(0.05, eps=1e-3),
    "frozen biases": lambda: optax.partition(
        {"train": optax.sgd(0.05), "freeze": optax.set_to_zero()},
        {"hidden": "train", "output": "train", "bias": "freeze"},
    ),
}


def _initial_parameters() -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(0))
    return {
        "hidden": 0.5 * jax.random.normal(keys[0], (NUM_FEATURES, 4)),
        "output": 0.5 * jax.random.normal(keys[1], (4,)),
        "bias": jnp.zeros((4,)),
    }


def _predict(state: Any, x: jax.Array) -> jax.Array:
    parameters = state[0]
    hidden = jnp.tanh(x @ parameters["hidden"] + parameters["bias"])
    return hidden @ parameters["output"]


def _step(optimizer: optax.GradientTransformation) -> Any:
    def step(reductions: Reductions, state: Any, x: jax.Array, y: jax.Array) -> Any:
        def share_of_loss(parameters: Any) -> jax.Array:
            return reductions.mean((_predict((parameters,), x) - y) ** 2)

        parameters, optimizer_state = state
        loss, gradients = reductions.total(jax.value_and_grad(share_of_loss)(parameters))
        updates, optimizer_state = optimizer.update(gradients, optimizer_state, parameters)
        return (optax.apply_updates(parameters, updates), optimizer_state), loss

    return step


def _assert_same(strategy: Any, optimizer: Any) -> None:
    parameters = _initial_parameters()
    # Some optimizers keep the parameters themselves; a copy may be donated.
    state = (parameters, optimizer.init(jax.tree.map(jnp.copy, parameters)))
    assert_like_plain_jax(strategy, _step(optimizer), _predict, state)


@pytest.mark.parametrize("name", _OPTIMIZERS)
def test_optimizer_updates_replicas_as_one_device(strategy: Any, name: str) -> None:
    _assert_same(strategy, _OPTIMIZERS[name]())


def test_multi_steps_accumulate_gradients_of_unequal_batches(strategy: Any) -> None:
    """Every third step updates, in a branch of `lax.cond` that all replicas take."""
    _assert_same(strategy, optax.MultiSteps(optax.adam(0.05, eps=1e-3), every_k_schedule=3))
