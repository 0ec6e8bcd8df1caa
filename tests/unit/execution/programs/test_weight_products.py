"""Products with a weight that is gathered in blocks, compared with those with a whole one."""

from __future__ import annotations

import itertools
from typing import Any

import stratagem as sg  # isort: skip - before keras, because it selects the JAX backend
import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

from stratagem.execution.programs import late_gathers as weight_products
from stratagem.execution.programs import late_step
from stratagem.execution.programs import late_weights as gradient_products
from stratagem.execution.programs.late_gathers import WeightProduct
from stratagem.execution.programs.late_weights import RowLookup
from tests.unit.execution.programs.test_late_step import late_function

BLOCK = 4  # columns


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late_step, "_MIN_LATE_BYTES", 0)
    for name in ("_MIN_BLOCK_BYTES", "_MIN_PART_BYTES"):
        monkeypatch.setattr(gradient_products, name, 1)
    monkeypatch.setattr(weight_products, "_MIN_BLOCK_COLUMNS", BLOCK)


def layer(x, inner):
    """A recomputed layer: weights that are larger than its own are not kept."""
    return jax.checkpoint(lambda x, inner: x + jnp.tanh(x @ inner))(x, inner)


def dense(weight, inner, x):
    return jnp.sum(jnp.sin(layer(x, inner) @ weight))


def transposed(weight, inner, x):
    return jnp.sum(jnp.sin(layer(x, inner) @ weight.T))


def half(weight, inner, x):
    logits = layer(x, inner).astype("bfloat16") @ weight.astype("bfloat16")
    return jnp.sum(jnp.sin(logits.astype("float32")))


def batched(weight, inner, x):
    stacked = jnp.stack([layer(x, inner)] * 2)
    return jnp.sum(jnp.sin(jnp.einsum("etd,edk->etk", stacked, weight)))


def of_sequences(weight, inner, x):
    return jnp.sum(jnp.sin(jnp.einsum("btd,dv->btv", layer(x, inner).reshape(2, 3, 8), weight)))


def heads(weight, inner, x):
    return jnp.sum(jnp.sin(jnp.einsum("td,dhk->htk", layer(x, inner), weight.reshape(8, 5, 3))))


# Loss, shape, sharded axis, and numbers of gathers of the weight in the forward and backward pass.
CASES = [
    (dense, (8, 18), 0, 5 + 5),
    (dense, (8, 18), 1, 2 + 2),
    (transposed, (18, 8), 0, 2 + 2),
    (transposed, (18, 8), 1, 5 + 5),
    (lambda weight, inner, x: jnp.sum(jnp.sin(weight @ layer(x, inner).T)), (18, 8), 0, 2 + 2),
    (half, (8, 18), 0, 5 + 5),
    (half, (8, 18), 1, 2 + 2),
    (of_sequences, (8, 18), 0, 5 + 5),
    (batched, (2, 8, 18), 1, 5 + 5),
    (heads, (8, 15), 0, 1 + 1),  # reshaped: not the weight alone
    (  # of two weights
        lambda w, inner, x: jnp.sum(jnp.sin(layer(x, inner))) + jnp.sum(jnp.cos(inner @ w)),
        (8, 18),
        0,
        None,
    ),
]


def late(loss: Any, shape: tuple[int, ...], axis: int) -> tuple[Any, list[Any]]:
    """The step whose weights come and whose gradients leave as shards, and its arguments."""
    weight = jax.random.normal(jax.random.key(0), shape) / 4
    inner = jax.random.normal(jax.random.key(1), (8, 8)) / 4
    batches = jax.random.normal(jax.random.key(2), (2, 6, 8))
    step = jax.value_and_grad(loss, (0, 1))
    function = late_function(step, [weight, inner, batches[0]], [axis, 0], {1: axis, 2: 0})
    return function, [weight, inner, batches]


def primitives(function: Any, args: Any) -> list[Any]:
    (eqn,) = jax.make_jaxpr(function)(*args).jaxpr.eqns
    return [*eqn.params["jaxpr"].eqns]


@pytest.mark.parametrize(("loss", "shape", "axis", "num_gathers"), CASES)
def test_weight_is_gathered_in_blocks_with_the_results_of_the_whole(
    loss, shape, axis, num_gathers
) -> None:
    function, args = late(loss, shape, axis)
    losses, *gradients = jax.jit(function)(*args)
    weight, inner, batches = args
    expected = [jax.value_and_grad(loss, (0, 1))(weight, inner, batch) for batch in batches]
    # Whole bfloat16 products are rounded once more than the sum of their blocks.
    tolerance = 2e-2 if loss is half else 1e-5
    np.testing.assert_allclose(losses, [one for one, _ in expected], rtol=tolerance)
    for place, gradient in enumerate(gradients):
        total = sum(one[place] for _, one in expected)
        np.testing.assert_allclose(gradient, total, rtol=tolerance, atol=tolerance)
    if num_gathers is None:
        return
    gathers = [one for one in primitives(function, args) if one.primitive.name == "all_gather"]
    sizes = [one.outvars[0].aval.size for one in gathers if one.outvars[0].aval.shape != (8, 8)]
    assert len(sizes) == num_gathers
    assert num_gathers == 2 or max(sizes) < int(np.prod(shape))


def test_weight_no_larger_than_a_recomputed_layer_is_gathered_whole() -> None:
    small = primitives(*late(dense, (8, 8), 0))
    gathers = [one for one in small if "gather" in str(one.primitive)]
    assert {one.outvars[0].aval.shape for one in gathers} == {(8, 8)}


def test_two_blocks_are_in_memory_at_once() -> None:
    eqns = primitives(*late(dense, (8, 18), 0))
    names = [one.primitive.name for one in eqns]
    of_layer = [one.outvars[0].aval.shape == (8, 8) for one in eqns]
    blocks = [i for i, name in enumerate(names) if name == "all_gather" and not of_layer[i]]
    barriers = [i for i, name in enumerate(names) if name == "optimization_barrier"]
    for earlier, later in itertools.pairwise(blocks):
        assert any(earlier < one < later for one in barriers)


def test_addends_of_half_precision_are_added_in_single_precision() -> None:
    """The gradient of the input has an addend for each block of the vocabulary."""
    eqns = primitives(*late(half, (8, 18), 0))
    added = [one for one in eqns if one.primitive.name == "add"]
    assert {one.outvars[0].aval.dtype for one in added if one.outvars[0].aval.shape == (6, 8)} == {
        jnp.dtype("float32")
    }


def fitted_weights(strategy: Any) -> list[Any]:
    keras.utils.set_random_seed(3)
    with strategy.scope():
        tokens = keras.Input((1,), dtype="int32")
        x = keras.layers.Flatten()(keras.layers.Embedding(64, 32)(tokens))
        hidden = keras.layers.Dense(32, "tanh")
        model = keras.Model(tokens, keras.layers.Dense(99)(keras.layers.ReLU()(hidden(x))))
        sg.remat(model, layers=[hidden])
        model.compile("adam", "mse")
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 64, (20, 1)), rng.normal(size=(20, 99))
    model.fit(x, y, batch_size=8, epochs=2, verbose=0, shuffle=False)
    return [keras.ops.convert_to_numpy(one) for one in model.weights]


def test_fit_is_that_of_one_device(monkeypatch) -> None:
    """Products with a weight in blocks, and lookups in a table in blocks."""
    used: set[type] = set()
    for kind in (WeightProduct, RowLookup):
        value: Any = kind.value
        monkeypatch.setattr(
            kind, "value", lambda *args, kind=kind, value=value: (used.add(kind), value(*args))[1]
        )
    devices = jax.devices()[:2]
    found = fitted_weights(sg.MirroredStrategy(devices, shard_state="all"))
    expected = fitted_weights(sg.OneDeviceStrategy(devices[0]))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
    assert used == {WeightProduct, RowLookup}
