"""Rows, a strategy of islands, a small model that trains under it, and a simulation in JAX.

The simulation trains one set of weights per island on the rows of the island, as one device would.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

import stratagem as sg
from stratagem.devices.local_updates import DiLoCo

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


def rows_of(length: int, count: int) -> list[slice]:
    """Returns the rows of each replica in a batch."""
    part = -(-length // count)
    return [slice(min(one * part, length), min((one + 1) * part, length)) for one in range(count)]


def mean_square(state: Any, x: Any, y: Any, weights: Any) -> Any:
    return jnp.mean((x @ state[0] + state[1] - y) ** 2)


def trained(
    start: Any,
    method: Any,
    count: int,
    size: int,
    *,
    loss: Any = mean_square,
    epochs: int = 2,
    num: int = len(X),
    per_update: int = 1,
) -> tuple[Any, Any, list[float]]:
    """Returns the global weights, those of each island, and the mean loss of each epoch.

    `loss(weights, x, y, example_weights)` is the loss of an island's rows, and an update is made of
    so many batches.
    """
    start = [jnp.asarray(one) for one in start]
    gradient = jax.value_and_grad(loss)
    islands = count // size
    whole, own, num_batches = start, [start] * islands, 0
    zeros = [jnp.zeros_like(one) for one in start]
    momentum, sums, means = zeros, [zeros] * islands, []
    for _ in range(epochs):
        total = 0.0
        for first in range(0, num, BATCH):
            x, y, w = (one[first : min(first + BATCH, num)] for one in (X, Y, WEIGHTS))
            rows = rows_of(len(x), count)
            num_batches += 1
            for island in range(islands):
                mine = slice(rows[island * size].start, rows[(island + 1) * size - 1].stop)
                if mine.start < mine.stop:
                    value, grads = gradient(own[island], x[mine], y[mine], w[mine])
                    total += float(value) * (mine.stop - mine.start)
                    sums[island] = [a + b for a, b in zip(sums[island], grads, strict=True)]
                if num_batches % per_update == 0:
                    pairs = zip(own[island], sums[island], strict=True)
                    own[island] = [a - RATE / per_update * b for a, b in pairs]
                    sums[island] = zeros
            step, rest = divmod(num_batches, per_update)
            if rest or (step % method.period and step > method.warmup_steps):
                continue
            changes = [sum(parts) / islands - a for a, *parts in zip(whole, *own, strict=True)]
            if isinstance(method, DiLoCo):
                beta, rate = method.outer_momentum, method.outer_learning_rate
                momentum = [beta * m + c for m, c in zip(momentum, changes, strict=True)]
                changes = [rate * (beta * m + c) for m, c in zip(momentum, changes, strict=True)]
            whole = [a + c for a, c in zip(whole, changes, strict=True)]
            own = [whole] * islands
        means.append(total / num)
    return whole, own, means
