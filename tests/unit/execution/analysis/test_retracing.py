"""Evaluating a trace anew gives what the function gives, without the mesh that it was traced in."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from stratagem.execution.analysis.retracing import retrace


def conditions(x: jax.Array) -> jax.Array:
    return jax.lax.cond(x.sum() > 0, lambda v: jnp.where(v > 1, v, -v), lambda v: v * 3, x)


def loops(x: jax.Array) -> jax.Array:
    limit = x.max()
    return jax.lax.while_loop(lambda v: v.sum() < 40 + limit, lambda v: v * 2 + limit, x)


def scans(x: jax.Array) -> jax.Array:
    scale = jnp.clip(x[0], 1, 2)

    def step(carry, part):
        return carry + part * scale, jnp.linalg.norm(carry)

    end, parts = jax.lax.scan(step, jnp.zeros(()), x, reverse=True)
    return jnp.concatenate([end[None], parts])


def derivatives(x: jax.Array) -> jax.Array:
    return jax.nn.relu(x) + jax.checkpoint(jnp.sin)(x) + jax.nn.silu(x) + jax.nn.softmax(x)


def distinct(x: jax.Array) -> jax.Array:
    values, places = jnp.unique(x, return_inverse=True, size=6, fill_value=9)
    return values + places.sum().astype(x.dtype) + jax.ops.segment_sum(x, places, num_segments=6)


def repeats(x: jax.Array) -> jax.Array:
    return jax.lax.fori_loop(0, 3, lambda index, v: v @ v.T / (index + 1), jnp.outer(x, x))


@pytest.mark.slow
@pytest.mark.parametrize("function", [conditions, loops, scans, derivatives, distinct, repeats])
def test_gives_what_the_function_gives(function) -> None:
    x = jnp.array([0.5, 2.0, -1.0, 3.0])
    traced = jax.make_jaxpr(jax.jit(function))(x)
    for given in (x, -x):
        (got,) = jax.jit(lambda value: retrace(traced, [value]))(given)
        np.testing.assert_allclose(got, function(given), rtol=1e-6)


def test_calls_of_a_name_can_be_replaced() -> None:
    @jax.jit
    def doubled(x):
        return x * 2

    traced = jax.make_jaxpr(lambda x: doubled(x) + jax.jit(jnp.square)(x))(jnp.ones(2))
    (got,) = retrace(traced, [jnp.full(2, 3.0)], {"doubled": lambda x: [x * 10]})
    np.testing.assert_array_equal(got, [39.0, 39.0])


@pytest.mark.compatibility
def test_what_was_traced_for_replicas_goes_with_arrays_of_a_mesh() -> None:
    mesh = Mesh(np.array(jax.devices()[:2]), ("replica",))

    def function(x):
        order = jnp.unique(x, size=4)
        return jnp.where(x > 0, jnp.clip(x, 0, 2), jax.nn.softplus(x)) + order

    whole = jax.make_jaxpr(
        jax.shard_map(function, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    )(jnp.ones(4))
    (eqn,) = whole.eqns
    x = jax.device_put(jnp.array([1.0, -1.0, 3.0, 0.0]), NamedSharding(mesh, P("replica")))
    (got,) = jax.jit(lambda value: retrace(eqn.params["jaxpr"], [value * 1]))(x)
    np.testing.assert_allclose(got + x, function(x) + x, rtol=1e-6)
