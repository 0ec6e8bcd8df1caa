"""Experts divided over the devices of a replica: the numbers of one device, nothing gathered."""

from __future__ import annotations

import contextlib
import functools
import re
from typing import Any

import keras
import numpy as np
import pytest
from keras import ops

import stratagem as sg
from stratagem.keras.training.model import lower_training_step

WIDTH, INNER, NUM_EXPERTS = 8, 24, 4
LAYOUTS = {".*/experts_(in|out)": ("logical", None, None)}
RNG = np.random.default_rng(11)
X, Y = RNG.normal(size=(2, 8, 6, WIDTH)).astype("float32")


class Experts(keras.layers.Layer):
    """Two experts of four for each token, with a loss that balances them over the global batch."""

    def build(self, input_shape: Any) -> None:
        self.router = self.add_weight((WIDTH, NUM_EXPERTS), name="router")
        self.inner = self.add_weight((NUM_EXPERTS, WIDTH, INNER), name="experts_in")
        self.outer = self.add_weight((NUM_EXPERTS, INNER, WIDTH), name="experts_out")

    def call(self, x: Any) -> Any:
        shares = ops.softmax(ops.matmul(x, self.router))
        best, numbers = ops.top_k(shares, 2)
        chosen = ops.one_hot(numbers, NUM_EXPERTS)
        gates = ops.sum(chosen * best[..., None], axis=-2)
        self.add_loss(balance_loss(chosen, shares))
        hidden = ops.silu(ops.einsum("btd,edf->ebtf", x, self.inner))
        return ops.einsum("ebtf,efd,bte->btd", hidden, self.outer, gates)


def balance_loss(chosen: Any, shares: Any) -> Any:
    """Returns the product of how often experts are chosen, over all replicas, and their shares."""
    frequencies = ops.mean(chosen, axis=(0, 1, 2))
    context = sg.get_replica_context()
    if context is not None:
        frequencies = context.all_reduce("mean", frequencies)
    return NUM_EXPERTS * ops.sum(frequencies * ops.mean(shares, axis=(0, 1)))


def made(scope: contextlib.AbstractContextManager[Any]) -> keras.Model:
    keras.utils.set_random_seed(3)
    with scope:
        model = keras.Sequential([keras.Input((6, WIDTH)), Experts(name="block")])
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    return model


def trained(scope: contextlib.AbstractContextManager[Any]) -> tuple[float, list[np.ndarray]]:
    model = made(scope)
    history = model.fit(X, Y, batch_size=4, epochs=1, verbose=0, shuffle=False)
    return history.history["loss"][0], model.get_weights()


@functools.cache
def alone() -> tuple[float, list[np.ndarray]]:
    return trained(contextlib.nullcontext())


def strategy_of(replicas: int, parts: int, **options: Any) -> sg.MirroredStrategy:
    names = [f"cpu:{index}" for index in range(replicas * parts)]
    return sg.MirroredStrategy(names, devices_per_replica=parts, layout_map=LAYOUTS, **options)


@pytest.mark.parametrize(
    ("replicas", "parts", "options"),
    [
        (2, 2, {}),
        pytest.param(1, 4, {}, marks=pytest.mark.slow),
        pytest.param(2, 4, {"shard_state": "all"}, marks=pytest.mark.slow),
        pytest.param(2, 2, {"sequence_axis": 1}, marks=pytest.mark.slow),
    ],
)
def test_experts_are_those_of_one_device(replicas, parts, options) -> None:
    strategy = strategy_of(replicas, parts, **options)
    loss, weights = trained(strategy.scope())
    expected_loss, expected = alone()
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    for value, wanted in zip(weights, expected, strict=True):
        np.testing.assert_allclose(value, wanted, rtol=1e-5, atol=1e-6)


def test_experts_are_not_gathered() -> None:
    """Each device computes its experts, and replicas sum the gradients of one device's."""
    strategy = strategy_of(2, 2)
    text = lower_training_step(made(strategy.scope()), (X[:4], Y[:4])).compile().as_text()
    assert not re.findall(rf"f32\[{NUM_EXPERTS},[\d,]+\]\S* all-gather\(", text)
    assert f"f32[{NUM_EXPERTS},{WIDTH},{INNER}]" not in text
    assert f"f32[{NUM_EXPERTS // 2},{WIDTH},{INNER}]" in text
