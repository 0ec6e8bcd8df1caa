"""Saves sharded variables and opens them with other devices, and writes what it saw.

`python sharded_checkpoints.py DEVICES FOLDER ACTION`, with TF_CONFIG on that cluster, with as many
devices a worker, without it on as many devices of one process. ACTION is "save" or "async", then
"open" for any number of devices, or "lose": process 1 is killed before it hands over its shards.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import jax
import keras
import numpy as np

import stratagem as sg
from stratagem.checkpoint.storage.process import StorageProcess

jax.config.update("jax_num_cpu_devices", int(sys.argv[1]))
folder, action = Path(sys.argv[2]), sys.argv[3]
is_cluster = "TF_CONFIG" in os.environ
chosen = sg.MultiWorkerMirroredStrategy if is_cluster else sg.MirroredStrategy
strategy = chosen(shard_state="all")


def make_model() -> keras.Model:
    keras.utils.set_random_seed(7)
    with strategy.scope():
        layers = [
            keras.Input((1000,)),
            keras.layers.Dense(512, activation="relu", name="first"),
            keras.layers.Dense(8, name="last"),
        ]
        model = keras.Sequential(layers, name="model")
        model.compile(keras.optimizers.Adam(0.01), "mse")
        model.optimizer.build(model.trainable_variables)
    return model


def train(model: keras.Model) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(16, 1000)).astype("float32"), rng.normal(size=(16, 8))
    model.fit(x, y, batch_size=16, verbose=0)


def values(model: keras.Model) -> dict[str, Any]:
    """Every process gathers; names are those of the variables."""
    every = [*model.variables, *model.optimizer.variables]
    return {one.path.replace("/", ":"): np.asarray(one.value) for one in every}


def write(name: str, found: dict[str, Any]) -> None:
    np.savez(folder / f"{name}-{jax.process_index()}.npz", **found)


def lose_process_1() -> None:
    """Kills process 1 when it would hand over its shards."""

    def kill(*arguments: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if jax.process_index() == 1:
        StorageProcess.write_shards = kill  # type: ignore[method-assign]


model = make_model()
manager = sg.train.CheckpointManager(
    sg.train.Checkpoint(model=model), folder / "checkpoints", max_to_keep=2
)
if action == "open":
    restored = manager.restore_or_initialize()
    assert restored is not None
    write("opened", values(model) | {"path": np.array(Path(restored).name)})
    sys.exit()
train(model)
options = sg.train.CheckpointOptions(enable_async=action == "async")
manager.save(options=options)
manager.sync()
write("saved", values(model))
if action == "lose":
    lose_process_1()
    manager.save()
