"""Costs of traced steps of a few products, compared with arithmetic."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from stratagem.planning.traced_costs import trace_costs

_ROWS, _WIDTH = 32, 64
_PRODUCT = 2 * _ROWS * _WIDTH * _WIDTH
_ARRAY = 4 * _ROWS * _WIDTH


def _weights(count: int) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct((_WIDTH, _WIDTH), "float32")] * count


def _step(forward, weights, rows=_ROWS):
    def step(weights, x):
        gradients = jax.grad(lambda weights: jnp.sum(forward(weights, x)))(weights)
        return [one - 0.1 * gradient for one, gradient in zip(weights, gradients, strict=True)]

    x = jax.ShapeDtypeStruct((rows, _WIDTH), "float32")
    return jax.make_jaxpr(step)(weights, x), {i: i for i in range(len(weights))}


def _chain(weights, x):
    for one in weights:
        x = jnp.tanh(x @ one)
    return x


def _recomputed(weights, x):
    for one in weights:
        x = jax.checkpoint(lambda x, one: jnp.tanh(x @ one))(x, one)
    return x


def test_products_and_kept_arrays_of_a_chain() -> None:
    """Three products a layer, without that for the input of the first."""
    few, many = (trace_costs(*_step(_chain, _weights(count))) for count in (4, 12))
    assert few.flops == (3 * 4 - 1) * _PRODUCT
    grown = (many.activation_bytes - few.activation_bytes) / 8
    # The product, from which the gradient of tanh is computed, and the input of the next product.
    assert _ARRAY <= grown <= 3 * _ARRAY
    assert few.with_gradients_bytes > few.activation_bytes


def test_recomputation_takes_a_product_and_saves_arrays() -> None:
    kept = trace_costs(*_step(_chain, _weights(12)))
    recomputed = trace_costs(*_step(_recomputed, _weights(12)))
    assert recomputed.flops == pytest.approx(kept.flops + 12 * _PRODUCT, rel=0.03)
    assert recomputed.activation_bytes < kept.activation_bytes


def test_a_loop_counts_as_often_as_it_runs() -> None:
    def scanned(weights, x):
        return jax.lax.scan(lambda x, _: (jnp.tanh(x @ weights[0]), None), x, length=5)[0]

    x = jax.ShapeDtypeStruct((_ROWS, _WIDTH), "float32")
    jaxpr = jax.make_jaxpr(scanned)(_weights(1), x)
    assert trace_costs(jaxpr, {}).flops == 5 * _PRODUCT


def test_offloaded_arrays_are_on_the_host() -> None:
    policy = jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host")

    def offloaded(weights, x):
        for one in weights:
            layer = jax.checkpoint(lambda x, one: jnp.tanh(jnp.sin(x @ one)), policy=policy)
            x = layer(x, one)
        return x

    found = trace_costs(*_step(offloaded, _weights(6)))
    assert found.host_bytes == 6 * _ARRAY


def test_scores_of_fused_attention_are_no_arrays() -> None:
    def attend(weights, x):
        query = jnp.reshape(x @ weights[0], (1, _ROWS, 8, 8))
        return jax.nn.dot_product_attention(query, query, query)

    plain = trace_costs(*_step(attend, _weights(1)))
    fused = trace_costs(*_step(attend, _weights(1)), attention_share=7 / 12)
    assert fused.activation_bytes < plain.activation_bytes
    products = 2 * _PRODUCT
    assert fused.flops == pytest.approx(products + 7 / 12 * (plain.flops - products))


def test_devices_of_a_replica_sum_products_over_a_divided_axis() -> None:
    jaxpr, trained = _step(_chain, _weights(2))
    by_columns_then_rows = {0: frozenset({1}), 1: frozenset({0})}
    found = trace_costs(jaxpr, trained, divisions=by_columns_then_rows)
    assert found.summed_bytes == _ARRAY  # the input's gradient is not needed
    assert 0 < found.divided_share < 1
    assert trace_costs(jaxpr, trained).summed_bytes == 0
