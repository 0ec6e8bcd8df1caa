"""Model, data and callbacks of `elastic.py`, and of what its results are compared with."""

from __future__ import annotations

import keras
import numpy as np

__all__ = ["BATCH", "NUM_BATCHES", "data", "make_model", "random_callbacks"]

BATCH, NUM_BATCHES = 32, 6


def data() -> tuple[np.ndarray, np.ndarray]:
    """Returns inputs and targets."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(BATCH * NUM_BATCHES - 5, 8)).astype(np.float32)
    return x, (x[:, :1] * x[:, 1:2]).astype(np.float32)


def make_model() -> keras.Model:
    """Returns the model, the same in all processes."""
    keras.utils.set_random_seed(7)
    return keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(1)]
    )


def random_callbacks() -> list[keras.callbacks.Callback]:
    """Returns callbacks whose states decide on learning rates of later epochs."""
    return [keras.callbacks.ReduceLROnPlateau("loss", 0.5, patience=2, min_delta=100, min_lr=0)]
