"""Trains until it is ended: `python running.py LOOP`, by `fit` or by a loop of one's own.

SIGUSR1 makes a worker leave early, wherever it is.
"""

from __future__ import annotations

import signal
import sys

import jax.numpy as jnp
import keras
import numpy as np

import stratagem as sg

[loop] = sys.argv[1:]
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0))
strategy = sg.MultiWorkerMirroredStrategy()
print("joined", flush=True)

with strategy.scope():
    model = keras.Sequential([keras.layers.Input((16,)), keras.layers.Dense(8, "relu")])
    model.add(keras.layers.Dense(1))
    optimizer = keras.optimizers.Adam()
    model.compile(optimizer, "mse")
data = np.ones((96, 16), "float32"), np.ones((96, 1), "float32")
if loop == "fit":
    model.fit(*data, batch_size=9, epochs=10**6, validation_data=data, verbose=0)


def step(x, y):
    loss, gradients = sg.value_and_grad(
        lambda: jnp.mean((model(x) - y) ** 2), model.trainable_variables
    )
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return loss


while loop == "loop":
    for batch in strategy.distribute_dataset(sg.input.Dataset(data, batch_size=9)):
        loss = strategy.reduce("MEAN", strategy.run(step, args=batch), axis=None)
    assert np.isfinite(loss)
