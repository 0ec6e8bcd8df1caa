"""Trains a network whose large gradients are summed by one algorithm, and writes its weights.

`python sharing_memory_training.py ALGORITHM FOLDER`: each process writes FOLDER/ALGORITHM-N.npz.
"""

from __future__ import annotations

import sys
from pathlib import Path

import stratagem as sg  # isort: skip - before jax, because it readies the collectives

import jax
import keras
import numpy as np

from stratagem.devices.all_reduce import Algorithm
from stratagem.devices.shared_sums import SumServer
from stratagem.strategies import cross_device_ops

algorithm, folder = Algorithm(sys.argv[1]), Path(sys.argv[2])
if algorithm is not Algorithm.SHARED_MEMORY:  # which the rule chooses
    cross_device_ops.algorithm_for = lambda size_bytes, **_: algorithm
strategy = sg.MultiWorkerMirroredStrategy()
started: list[int] = []
start = SumServer.start


def counted(server, call):
    started.append(call.arguments[0].size)
    start(server, call)


SumServer.start = counted
keras.utils.set_random_seed(7)
chance = np.random.default_rng(0)
x = chance.normal(size=(157, 500)).astype("float32")
y = chance.integers(0, 10, 157)
weights = np.linspace(0.5, 1.5, len(x)).astype("float32")
with strategy.scope():
    model = keras.Sequential([keras.layers.Dense(400, activation="relu"), keras.layers.Dense(10)])
    model.compile(
        keras.optimizers.Adam(1e-3),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        steps_per_execution=2,
    )
# The last batch of an epoch has 29 examples, which no number of workers divides.
history = model.fit(x, y, sample_weight=weights, batch_size=32, epochs=2, verbose=0)
values = [np.asarray(value) for value in model.get_weights()]
np.savez(folder / f"{algorithm.name}-{jax.process_index()}.npz", *values, history.history["loss"])
print("shared", len(started), flush=True)
