"""Modules of Flax NNX, Haiku and Equinox, trained in `strategy.run`."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from validation.third_party.regression_problem import (
    NUM_FEATURES,
    Reductions,
    assert_like_plain_jax,
)

_OPTIMIZER = optax.adam(0.02, eps=1e-3)


def test_nnx_module_and_optimizer_are_split_and_merged_in_the_step(strategy: Any) -> None:
    class Network(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.hidden = nnx.Linear(NUM_FEATURES, 4, rngs=rngs)
            self.norm = nnx.LayerNorm(4, rngs=rngs)
            self.output = nnx.Linear(4, 1, rngs=rngs)
            self.calls = nnx.Variable(jnp.zeros((), "int32"))

        def __call__(self, x: jax.Array) -> jax.Array:
            self.calls[...] += 1
            return self.output(nnx.tanh(self.norm(self.hidden(x))))[:, 0]

    model = Network(nnx.Rngs(0))
    graph, state = nnx.split((model, nnx.Optimizer(model, _OPTIMIZER, wrt=nnx.Param)))

    def step(reductions: Reductions, state: Any, x: jax.Array, y: jax.Array) -> Any:
        model, optimizer = nnx.merge(graph, state)

        def share_of_loss(model: Any) -> jax.Array:
            return reductions.mean((model(x) - y) ** 2)

        loss, gradients = reductions.total(nnx.value_and_grad(share_of_loss)(model))
        optimizer.update(model, gradients)
        return nnx.state((model, optimizer)), loss

    def predict(state: Any, x: jax.Array) -> jax.Array:
        return nnx.merge(graph, state, copy=True)[0](x)  # the call is not counted

    assert_like_plain_jax(strategy, step, predict, state)


def test_haiku_parameters_and_state_are_arguments_and_results(strategy: Any) -> None:
    def forward(x: jax.Array) -> jax.Array:
        calls = hk.get_state("calls", (), "int32", init=jnp.zeros)
        hk.set_state("calls", calls + 1)
        sequence = jnp.tanh(hk.Linear(4)(x[..., None]))  # (rows, features, 4), read as a sequence
        core = hk.GRU(3)
        outputs, _ = hk.dynamic_unroll(
            core, sequence, core.initial_state(x.shape[0]), time_major=False
        )
        return hk.Linear(1)(outputs[:, -1])[:, 0]

    network = hk.transform_with_state(forward)
    parameters, own_state = network.init(jax.random.key(1), np.zeros((1, NUM_FEATURES), "float32"))
    state = (parameters, own_state, _OPTIMIZER.init(parameters), jax.random.key(2))

    def step(reductions: Reductions, state: Any, x: jax.Array, y: jax.Array) -> Any:
        parameters, own_state, optimizer_state, key = state
        key, used = jax.random.split(key)

        def share_of_loss(parameters: Any) -> Any:
            outputs, new_state = network.apply(parameters, own_state, used, x)
            return reductions.mean((outputs - y) ** 2), new_state

        gradient = jax.value_and_grad(share_of_loss, has_aux=True)
        (share, own_state), gradients = gradient(parameters)
        loss, gradients = reductions.total((share, gradients))
        updates, optimizer_state = _OPTIMIZER.update(gradients, optimizer_state)
        parameters = optax.apply_updates(parameters, updates)
        return (parameters, own_state, optimizer_state, key), loss

    def predict(state: Any, x: jax.Array) -> jax.Array:
        return network.apply(state[0], state[1], None, x)[0]

    assert_like_plain_jax(strategy, step, predict, state)


class _Attention(eqx.Module):
    """Attention over the features of a row, each embedded by a small network."""

    embedding: eqx.nn.MLP
    attention: eqx.nn.MultiheadAttention
    output: eqx.nn.Linear

    def __init__(self, key: jax.Array) -> None:
        keys = jax.random.split(key, 3)
        self.embedding = eqx.nn.MLP(1, 4, 5, 1, activation=jnp.tanh, key=keys[0])
        self.attention = eqx.nn.MultiheadAttention(2, 4, key=keys[1])
        self.output = eqx.nn.Linear(4, "scalar", key=keys[2])

    def __call__(self, row: jax.Array) -> jax.Array:
        embedded = jax.vmap(self.embedding)(row[:, None])
        return self.output(self.attention(embedded, embedded, embedded).mean(axis=0))


@pytest.mark.parametrize("is_jitted", [False, True], ids=["plain step", "filter_jit"])
def test_equinox_module_is_partitioned_and_combined(strategy: Any, is_jitted: bool) -> None:
    """Arrays are arguments and results of the step; functions and sizes are its closure."""
    arrays, static = eqx.partition(_Attention(jax.random.key(3)), eqx.is_inexact_array)

    @eqx.filter_value_and_grad
    def share_of_loss(model: Any, reductions: Reductions, x: jax.Array, y: jax.Array) -> jax.Array:
        return reductions.mean((jax.vmap(model)(x) - y) ** 2)

    def step(reductions: Reductions, state: Any, x: jax.Array, y: jax.Array) -> Any:
        arrays, optimizer_state = state
        model = eqx.combine(arrays, static)
        loss, gradients = reductions.total(share_of_loss(model, reductions, x, y))
        updates, optimizer_state = _OPTIMIZER.update(gradients, optimizer_state)
        arrays = eqx.filter(eqx.apply_updates(model, updates), eqx.is_inexact_array)
        return (arrays, optimizer_state), loss

    def predict(state: Any, x: jax.Array) -> jax.Array:
        return jax.vmap(eqx.combine(state[0], static))(x)

    state = (arrays, _OPTIMIZER.init(arrays))
    assert_like_plain_jax(strategy, eqx.filter_jit(step) if is_jitted else step, predict, state)
