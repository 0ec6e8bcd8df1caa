"""Keras alone, from the same batches as an elastic group: what its members must end with."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

__all__ = ["reference", "weights_of"]


def reference() -> tuple[list[np.ndarray], list[float]]:
    """Returns the weights and logs of Keras alone, trained as by `programs/elastic.py`."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(32 * 6 - 5, 8)).astype(np.float32)
    y = (x[:, :1] * x[:, 1:2]).astype(np.float32)
    keras.utils.set_random_seed(7)
    model: Any = keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(1)]
    )
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    history = model.fit(x, y, 32, 2, shuffle=False, verbose=0, validation_data=(x, y)).history
    logs = [*history["loss"], *history["mae"], *history["val_loss"], *history["val_mae"]]
    return [np.asarray(variable.value) for variable in model.weights], logs


def weights_of(result: np.lib.npyio.NpzFile) -> list[np.ndarray]:
    """Returns the weights that a member has written."""
    return [result[f"arr_{place}"] for place in range(4)]
