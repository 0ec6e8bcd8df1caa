"""The MLP as a Keras model, for workers that kill what trains it."""

from __future__ import annotations

from typing import Any

import keras

__all__ = ["make_mlp"]

_LEARNING_RATE = 0.01


def make_mlp(strategy: Any) -> Any:
    """Returns 784-256-128-10 with SGD, in the scope of a strategy.

    Args:
        strategy: whose variables it gets.
    """
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.layers.Input((784,)),
                keras.layers.Dense(256, activation="relu"),
                keras.layers.Dense(128, activation="relu"),
                keras.layers.Dense(10),
            ]
        )
        model.compile(
            keras.optimizers.SGD(_LEARNING_RATE),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    return model
