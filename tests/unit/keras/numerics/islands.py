"""Rows, a strategy of islands, and a small model that trains under it."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

import stratagem as sg

RNG = np.random.default_rng(1)
X = RNG.normal(size=(92, 4)).astype("float32")
Y = (X @ [1.0, -2.0, 0.5, 3.0] + 0.1 * RNG.normal(size=92)).astype("float32")[:, None]
WEIGHTS = RNG.uniform(0.1, 2.0, size=92).astype("float32")
# The last batch of an epoch has 8 examples: 3, 3 and 2 on three replicas; on six, two have none.
BATCH = 12
RATE = 0.05


def strategy_of(method: Any, count: int = 3, size: int = 1, **arguments: Any) -> Any:
    devices = [f"cpu:{index}" for index in range(count)]
    return sg.LocalUpdateStrategy(method, devices, replicas_per_island=size, **arguments)


def made(
    method: Any,
    count: int = 3,
    size: int = 1,
    *,
    loss: Any = "mse",
    optimizer: Any = None,
    layers: Any = None,
    **compiled: Any,
) -> Any:
    keras.utils.set_random_seed(0)
    with strategy_of(method, count, size).scope():
        layers = [keras.layers.Dense(1)] if layers is None else layers()
        model = keras.Sequential([keras.layers.Input((4,)), *layers])
        optimizer = keras.optimizers.SGD(RATE) if optimizer is None else optimizer
        model.compile(optimizer, loss, **compiled)
    return model


def fit(model: Any, epochs: int = 2, num: int = len(X), **arguments: Any) -> dict[str, Any]:
    arguments = {"batch_size": BATCH, "shuffle": False, "verbose": 0, **arguments}
    return model.fit(X[:num], Y[:num], epochs=epochs, **arguments).history
