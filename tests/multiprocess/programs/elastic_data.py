"""Model, data and callbacks of `elastic.py`, and what its members must end with."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

__all__ = [
    "BATCH",
    "NUM_BATCHES",
    "data",
    "make_model",
    "random_callbacks",
    "reference",
    "weights_of",
]

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


def reference(*, is_random: bool = False) -> tuple[list[np.ndarray], list[float]]:
    """Returns the weights and logs of Keras alone, on data in order or shuffled."""
    model, (x, y) = make_model(), data()
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    options: Any = {"epochs": 2, "shuffle": False, "validation_data": (x, y)}
    if is_random:
        keras.utils.set_random_seed(8)
        options = {"epochs": 4, "callbacks": random_callbacks()}
    history = model.fit(x, y, BATCH, verbose=0, **options).history
    names = ["learning_rate"] if is_random else ["val_loss", "val_mae"]
    assert not is_random or len(set(history["learning_rate"])) > 1
    logs = [value for name in ("loss", "mae", *names) for value in history[name]]
    return [np.asarray(variable.value) for variable in model.weights], logs


def weights_of(result: np.lib.npyio.NpzFile) -> list[np.ndarray]:
    """Returns the weights that a member has written."""
    return [result[f"arr_{place}"] for place in range(4)]
