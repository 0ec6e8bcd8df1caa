"""Training that sends less, of one process or several: `python slow_links.py DEVICES FOLDER`.

Each process writes the weights of each way to FOLDER/process-N.npz.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

num_devices, folder = int(sys.argv[1]), Path(sys.argv[2])
os.environ["JAX_NUM_CPU_DEVICES"] = str(num_devices)

import jax  # noqa: E402
import keras  # noqa: E402
import numpy as np  # noqa: E402

import stratagem as sg  # noqa: E402

rng = np.random.default_rng(0)
x = rng.normal(size=(92, 32)).astype("float32")
y = rng.normal(size=(92, 64)).astype("float32")


def compressed(name: str) -> Any:
    if num_devices == 1:
        options = sg.CommunicationOptions(compression=name)
        return sg.MultiWorkerMirroredStrategy(communication_options=options)
    return sg.MirroredStrategy(cross_device_ops=sg.CompressedAllReduce(name))


def weights_after_training(strategy: sg.Strategy) -> list[np.ndarray]:
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((32,)), keras.layers.Dense(64)])
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse", steps_per_execution=2)
    model.fit(x, y, batch_size=24, epochs=2, shuffle=False, verbose=0)
    return model.get_weights()


found: dict[str, np.ndarray] = {}
ways = {
    "diloco": lambda: sg.LocalUpdateStrategy(sg.local_updates.DiLoCo(period=3)),
    **{name: lambda name=name: compressed(name) for name in ("int8", "power_sgd")},
}
for way, make in ways.items():
    for place, value in enumerate(weights_after_training(make())):
        found[f"{way} {place}"] = value
np.savez(folder / f"process-{jax.process_index()}.npz", **found)
