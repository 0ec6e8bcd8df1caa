"""Training of two islands of two replicas: `python islands.py DEVICES ISLAND FOLDER`.

DEVICES is their number in each process, and ISLAND the argument `replicas_per_island`. Each process
writes the weights of each way to FOLDER/process-N.npz.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

num_devices, given, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
os.environ["JAX_NUM_CPU_DEVICES"] = str(num_devices)

import jax  # noqa: E402
import keras  # noqa: E402
import numpy as np  # noqa: E402

import stratagem as sg  # noqa: E402

rng = np.random.default_rng(0)
x = rng.normal(size=(92, 32)).astype("float32")
y = rng.normal(size=(92, 64)).astype("float32")
replicas_per_island: Any = given if given == "process" else int(given)


def weights_after_training(method: sg.local_updates.LocalUpdates) -> list[np.ndarray]:
    keras.utils.set_random_seed(0)
    strategy = sg.LocalUpdateStrategy(method, replicas_per_island=replicas_per_island)
    assert strategy.num_islands == 2
    with strategy.scope():
        layers = [
            keras.layers.Input((32,)),
            keras.layers.BatchNormalization(synchronized=True),
            keras.layers.Dense(64),
        ]
        model = keras.Sequential(layers)
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse", steps_per_execution=2)
    model.fit(x, y, batch_size=24, epochs=2, shuffle=False, verbose=0)
    return model.get_weights()


found: dict[str, np.ndarray] = {}
ways = {
    "diloco": sg.local_updates.DiLoCo(period=3),
    "streaming": sg.local_updates.StreamingDiLoCo(period=4, fragments=2, overlap=2),
    "int8": sg.local_updates.LocalSGD(period=3, compression="int8"),
}
for way, method in ways.items():
    for place, value in enumerate(weights_after_training(method)):
        found[f"{way} {place}"] = value
np.savez(folder / f"process-{jax.process_index()}.npz", **found)
