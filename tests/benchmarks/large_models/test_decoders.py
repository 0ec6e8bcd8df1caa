"""The decoder of Keras's layers and the one by hand compute the same."""

from __future__ import annotations

from typing import Any

import jax
import keras
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from benchmarks.large_models import jax_decoder
from benchmarks.large_models.cases import DECODERS
from benchmarks.large_models.keras_decoder import build_decoder, compiled

pytestmark = pytest.mark.slow

_LENGTH, _NUM_DEVICES = 8, 2
_SIZES = DECODERS["tiny"]


def _weights_by_hand(model: Any) -> dict[str, Any]:
    """Returns the weights of a Keras decoder under the names of the one by hand."""
    found = {one.path.replace("/", " "): np.asarray(one.value) for one in model.weights}
    block, ends = jax_decoder.weight_shapes(_SIZES)

    def named(*words: str) -> np.ndarray:
        (value,) = [value for path, value in found.items() if path.split()[:-1] == [*words]]
        return value

    return {name: named(name) for name in ends} | {
        "blocks": {
            name: np.stack([named(f"block_{number}", name) for number in range(2)])
            for name in block
        }
    }


@pytest.mark.parametrize("recomputes", [True, False])
def test_losses_and_gradients_by_hand_equal_those_of_keras(recomputes: bool) -> None:
    keras.utils.set_random_seed(1)
    model = build_decoder(_SIZES, _LENGTH, recomputes=recomputes)
    random = np.random.default_rng(0)
    tokens, labels = random.integers(0, _SIZES.vocabulary, (2, _NUM_DEVICES, _LENGTH))
    weights = _weights_by_hand(model)
    expected = compiled(model).evaluate(tokens, labels, verbose=0)
    case = (_SIZES, "float32", recomputes, _NUM_DEVICES)
    data = PartitionSpec("data")
    specs = dict.fromkeys(weights, data) | {
        "blocks": {name: PartitionSpec(None, "data") for name in weights["blocks"]}
    }

    def step(weights: Any, tokens: Any, labels: Any) -> Any:
        loss, gradients = jax.value_and_grad(jax_decoder.local_loss)(weights, tokens, labels, case)
        return jax.lax.psum(loss, "data"), gradients

    run = jax.shard_map(
        step,
        mesh=Mesh(jax.devices()[:_NUM_DEVICES], ("data",)),
        in_specs=(specs, data, data),
        out_specs=(PartitionSpec(), specs),
        check_vma=False,
    )
    with jax.numpy_dtype_promotion("standard"):
        loss, gradients = jax.jit(run)(weights, tokens, labels)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    model.compile(keras.optimizers.SGD(1.0), model.loss)
    model.train_on_batch(tokens, labels)
    by_keras = jax.tree.map(np.subtract, weights, _weights_by_hand(model))
    jax.tree.map(lambda *pair: np.testing.assert_allclose(*pair, atol=1e-6), gradients, by_keras)
