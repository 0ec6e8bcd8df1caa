"""Gradients that are computed and summed in blocks, compared with whole ones."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from stratagem.devices.mesh import Topology
from stratagem.execution.jaxprs import readers_of
from stratagem.execution.programs import late_step
from stratagem.execution.programs import late_weights as gradient_products
from stratagem.execution.programs.late_weights import GradientProduct, Sharded, product_chain
from tests.unit.execution.programs.test_late_step import late_function

TOPOLOGY = Topology(tuple(jax.devices()[:2]))


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late_step, "_MIN_LATE_BYTES", 0)
    for name in ("_MIN_BLOCK_BYTES", "_MIN_PART_BYTES", "_MIN_BLOCK_ROWS"):
        monkeypatch.setattr(gradient_products, name, 1)


def sharded(axis: int, spec: PartitionSpec | None = None) -> Sharded:
    return Sharded(axis, spec or PartitionSpec(), TOPOLOGY)


def dense(weight, x):
    return jnp.sum(jnp.tanh(x @ weight))


def transposed(weight, x):
    return jnp.sum(jnp.sin(x @ weight.T))


def heads(weight, x):
    return jnp.sum(jnp.tanh(jnp.einsum("btd,dhk->bthk", x.reshape(2, -1, 8), weight)))


def half(weight, x):
    return jnp.sum(jnp.tanh(x.astype("bfloat16") @ weight.astype("bfloat16")).astype("float32"))


def scanned(weights, x):
    layer = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w @ w.T), None))
    return jnp.sum(jax.lax.scan(layer, x, weights)[0])


def scanned_once(weights, x):
    layer = jax.checkpoint(lambda x, w: (x + jnp.sum(jnp.tanh(x @ w)), None))
    return jnp.sum(jax.lax.scan(layer, x, weights)[0])


# Loss, shape, axis and number of sums, which is one where a gradient is the sum of two products.
CASES = {
    "dense, 0": (dense, (8, 12), 0, 4),
    "dense, 1": (dense, (8, 12), 1, 6),
    "transposed, 0": (transposed, (12, 8), 0, 6),
    "transposed, 1": (transposed, (12, 8), 1, 4),
    "half": (half, (8, 12), 0, 4),
    "heads, 0": (heads, (8, 4, 3), 0, 4),
    "heads, 1": (heads, (8, 4, 3), 1, 2),
    "batched": (
        lambda w, x: jnp.sum(jnp.tanh(jnp.einsum("etd,edk->etk", x.reshape(4, -1, 8), w))),
        (4, 8, 12), 1, 4,
    ),
    "rematerialized": (
        lambda w, x: jnp.sum(jax.checkpoint(lambda w, x: jnp.tanh(x @ w))(w, x)), (8, 12), 0, 4,
    ),
    "scanned once": (scanned_once, (3, 8, 12), 1, 4),
    "scanned": (scanned, (3, 8, 12), 1, 1),
    "used twice": (lambda w, x: jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w.T)), (8, 12), 0, 1),
}  # fmt: skip


@pytest.mark.parametrize(("loss", "shape", "axis", "num_sums"), CASES.values(), ids=CASES)
def test_sum_of_blocks_is_the_sum(loss, shape, axis, num_sums) -> None:
    weight = jax.random.normal(jax.random.key(0), shape) / 4
    batches = jax.random.normal(jax.random.key(1), (2, 8, 8))
    function = late_function(jax.grad(loss), [weight, batches[0]], [axis], {0: axis})
    expected = sum(jax.grad(loss)(weight, batch) for batch in batches)
    (found,) = jax.jit(function)(weight, batches)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert str(jax.make_jaxpr(function)(weight, batches)).count("reduce_scatter[") == num_sums


@pytest.mark.parametrize(
    ("bytes_", "part_bytes", "rows", "count"),
    [(1, 1, 1, 4), (128, 1, 1, 2), (1, 80, 1, 2), (1, 1, 3, 2), (1, 1, 9, 1), (1000, 1, 1, 1)],
)
def test_blocks_have_a_least_size(monkeypatch, bytes_, part_bytes, rows, count) -> None:
    monkeypatch.setattr(gradient_products, "_MIN_BLOCK_BYTES", bytes_)
    monkeypatch.setattr(gradient_products, "_MIN_PART_BYTES", part_bytes)
    monkeypatch.setattr(gradient_products, "_MIN_BLOCK_ROWS", rows)
    product = product_of(lambda a, b: a @ b, (8, 5), (5, 12))
    assert product.num_blocks(sharded(0)) == count


def test_axis_that_a_replica_shards_or_that_does_not_divide_is_not_cut() -> None:
    product = product_of(lambda a, b: a @ b, (8, 5), (5, 9))
    assert product.num_blocks(sharded(0)) == 4
    assert product.num_blocks(sharded(0, PartitionSpec(None, "model"))) == 4
    assert product.num_blocks(sharded(0, PartitionSpec("model"))) == 1
    assert product.num_blocks(sharded(1)) == 1
    product = product_of(lambda a, b: jnp.einsum("eij,ejk->eik", a, b), (4, 8, 5), (4, 5, 12))
    assert [product.num_blocks(sharded(axis)) for axis in (0, 2)] == [1, 6]  # 0: of the batch


def product_of(function: Any, *shapes: tuple[int, ...]) -> GradientProduct:
    closed = jax.make_jaxpr(function)(*map(jnp.ones, shapes))
    (eqn,) = (one for one in closed.jaxpr.eqns if one.primitive.name == "dot_general")
    chain = product_chain(eqn, readers_of(closed.jaxpr))
    assert chain
    return GradientProduct(chain, [*map(jnp.ones, shapes)])


@pytest.mark.parametrize(
    "function",
    [
        lambda a, b: jnp.sin(a @ b),
        lambda a, b: ((c := a @ b), c),
        lambda a, b: ((c := a @ b), jnp.sum(c)),
        lambda a, b: (a @ b).reshape(-1),
    ],
    ids=["changed", "returned twice", "returned and read", "reshaped"],
)
def test_products_that_others_read_are_computed_at_once(function) -> None:
    jaxpr = jax.make_jaxpr(function)(jnp.ones((4, 5)), jnp.ones((5, 6))).jaxpr
    readers = readers_of(jaxpr)
    assert not any(product_chain(eqn, readers) for eqn in jaxpr.eqns)
