"""Trains a small decoder with a last weight that steps gather in blocks, and writes results.

`python blocks.py DEVICES FOLDER`: with TF_CONFIG in that cluster, in shards over as many devices a
worker; without it with copies on as many devices of one process.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import jax
import keras
import numpy as np

import stratagem as sg
from stratagem.execution.programs.late_gathers import WeightProduct

jax.config.update("jax_num_cpu_devices", int(sys.argv[1]))
folder = Path(sys.argv[2])
NUM_TOKENS, WIDTH = 150_000, 256  # 146 MiB: three blocks

products = []
value_of = WeightProduct.value


def recorded(self: WeightProduct, inputs: Any, exchange: Any) -> Any:
    products.append(self.shard.value.shape)
    return value_of(self, inputs, exchange)


WeightProduct.value = recorded
strategy: sg.Strategy
if "TF_CONFIG" in os.environ:
    strategy = sg.MultiWorkerMirroredStrategy(shard_state="all")
else:
    strategy = sg.MirroredStrategy()
keras.utils.set_random_seed(7)
with strategy.scope():
    features = keras.Input((8,))
    hidden = keras.layers.Dense(WIDTH, activation="tanh", name="hidden")(features)
    hidden = keras.layers.Dense(WIDTH, activation="tanh", name="again")(hidden)
    model = keras.Model(features, keras.layers.Dense(NUM_TOKENS, name="tokens")(hidden))
    sg.remat(model, layers="hidden|again")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(1.0), loss)
rng = np.random.default_rng(0)
x = rng.normal(size=(22, 8)).astype("float32")
y = rng.integers(0, NUM_TOKENS, (22, 1))
history = model.fit(x, y, batch_size=8, epochs=2, verbose=0, shuffle=False).history
results: dict[str, Any] = {"loss": np.array(history["loss"]), "products": np.array(products)}
for variable in model.weights:
    results[variable.path] = np.asarray(variable)
np.savez(folder / f"process-{jax.process_index()}.npz", **results)
