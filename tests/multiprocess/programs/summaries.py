"""Trains with summaries in `fit` and in a loop, into folders that the processes have in common.

`python summaries.py FOLDER WHAT [SHARD_STATE]`: with TF_CONFIG in that cluster, without it on two
devices of one process. WHAT is "fit" for both, or "loop".
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

folder, what, shard_state = Path(sys.argv[1]), sys.argv[2], (sys.argv[3:] or [None])[0]
is_alone = "TF_CONFIG" not in os.environ
jax.config.update("jax_num_cpu_devices", 2 if is_alone else 1)
make = sg.MirroredStrategy if is_alone else sg.MultiWorkerMirroredStrategy
strategy: sg.Strategy = make(shard_state=shard_state)


class Noting(keras.layers.Layer):
    def call(self, x: Any) -> Any:
        sg.summary.histogram("inputs", x)
        sg.summary.scalar("sum", keras.ops.sum(x))
        return x


x = np.random.default_rng(0).random((32, 4), np.float32)


def fit() -> None:
    keras.utils.set_random_seed(0)
    with strategy.scope():
        layers = [keras.layers.Input((4,)), Noting(), keras.layers.Dense(64), keras.layers.Dense(1)]
        model = keras.Sequential(layers)
        model.compile("adam", "mse", steps_per_execution=2)
    y = x.sum(axis=1, keepdims=True)
    callback = sg.TensorBoard(folder / "fit", histogram_freq=1, write_images=True, update_freq=2)
    options = {"batch_size": 8, "verbose": 0, "callbacks": [callback]}
    model.fit(x, y, epochs=2, shuffle=False, validation_data=(x[:16], y[:16]), **options)


if what == "fit":
    fit()
with strategy.scope():
    count = sg.Variable(0, dtype="int32", trainable=False, aggregation="only_first_replica")


def step(rows: Any) -> Any:
    sg.summary.scalar("rows", jax.numpy.sum(rows))
    count.assign_add(1)
    return jax.numpy.sum(rows)


writer = sg.summary.create_file_writer(folder / "loop")
with writer.as_default(step=count):
    for batch in strategy.experimental_distribute_dataset([x[:8], x[8:16], x[16:24]]):
        losses = strategy.run(step, args=(batch,))
        is_written = sg.summary.scalar("total", strategy.reduce("sum", losses, axis=None))
writer.close()
print("written" if is_written else "not written")
