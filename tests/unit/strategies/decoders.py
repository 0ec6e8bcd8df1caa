"""A small decoder with grouped-query attention, trained alone and under a strategy."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import keras
import numpy as np

import stratagem as sg

NUM_WORDS, WIDTH, HEADS, KEY_HEADS, HEAD_SIZE = 128, 64, 4, 2, 16
RNG = np.random.default_rng(0)
WORDS = RNG.integers(0, NUM_WORDS, (16, 6), dtype="int32")
NEXT_WORDS = RNG.integers(0, NUM_WORDS, (16, 6), dtype="int32")

# Heads, hidden units and words over the devices of a replica.
LAYOUTS = {
    "words/embeddings": ("logical", None),
    ".*/(query|key|value)/kernel": (None, "logical", None),
    ".*/attention_output/kernel": ("logical", None, None),
    "up_[0-9]/kernel": (None, "logical"),
    "up_[0-9]/bias": ("logical",),
    "down_[0-9]/kernel": ("logical", None),
}


def compiled_decoder(
    scope: AbstractContextManager[Any],
    optimizer: keras.optimizers.Optimizer,
    num_layers: int = 2,
    steps_per_execution: int = 1,
) -> keras.Model:
    """Makes a decoder in a scope, with the same initial values each time."""
    keras.utils.set_random_seed(3)
    with scope:
        ids = keras.Input((None,), dtype="int32")
        x = keras.layers.Embedding(NUM_WORDS, WIDTH, name="words")(ids)
        for i in range(num_layers):
            attention = keras.layers.GroupQueryAttention(
                HEAD_SIZE, HEADS, KEY_HEADS, use_bias=False, name=f"attention_{i}"
            )
            normed = keras.layers.RMSNormalization()(x)
            x = x + attention(normed, normed, use_causal_mask=True)
            hidden = keras.layers.Dense(4 * WIDTH, "silu", name=f"up_{i}")(
                keras.layers.RMSNormalization()(x)
            )
            x = x + keras.layers.Dense(WIDTH, name=f"down_{i}")(hidden)
        model = keras.Model(ids, keras.layers.Dense(NUM_WORDS, name="logits")(x))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, steps_per_execution=steps_per_execution)
    return model


def decoder_strategy(
    replicas: int, model: int = 1, shard_state: str | None = None, shard_size: int | None = None
) -> sg.MirroredStrategy:
    """Replicas of as many devices each, which divide the weights by layouts."""
    return sg.MirroredStrategy(
        [f"cpu:{index}" for index in range(replicas * model)],
        devices_per_replica=model if model > 1 else None,
        layout_map=LAYOUTS if model > 1 else None,
        shard_state=shard_state,
        shard_size=shard_size,
    )


def fit_decoder(model: keras.Model) -> list[float]:
    """Trains for two epochs of two batches; returns the losses."""
    fit: dict[str, Any] = {"batch_size": 8, "epochs": 2, "verbose": 0, "shuffle": False}
    return model.fit(WORDS, NEXT_WORDS, **fit).history["loss"]


def largest_difference(model: keras.Model, reference: keras.Model) -> float:
    """Returns the largest difference of a variable, relative to its largest value."""
    pairs = zip(
        [*model.weights, *model.optimizer.variables],
        [*reference.weights, *reference.optimizer.variables],
        strict=True,
    )
    found = []
    for one, other in pairs:
        value, wanted = one.numpy(), other.numpy()
        scale = float(np.max(np.abs(wanted), initial=0.0)) or 1.0
        found.append(float(np.max(np.abs(value - wanted), initial=0.0)) / scale)
    return max(found)
