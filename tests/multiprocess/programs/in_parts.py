"""Trains with state in parts over the devices of all processes, and writes what came out.

`python in_parts.py DEVICES KEPT FOLDER [short]`: with TF_CONFIG on that cluster, with as many
devices a worker, as on the hosts of a TPU where STRATAGEM_TPU_PLATFORM is set; without it on as
many devices of one process. KEPT is "none" for copies, a shard_state with or without a shard_size
("all/2"), or the place of the table. A short run trains and is not saved. Each process writes what
it saw to FOLDER/process-N.npz.
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

jax.config.update("jax_num_cpu_devices", int(sys.argv[1]))
kept = sys.argv[2]
how: dict[str, Any] = {}
shard_state, _, shard_size = kept.partition("/")
if shard_state in ("optimizer", "all"):
    how = {"shard_state": shard_state, "shard_size": int(shard_size) if shard_size else None}
elif kept != "none":
    how = {"placement": {"embedding": kept}}
folder = Path(sys.argv[3])
strategy: sg.Strategy
if "STRATAGEM_TPU_PLATFORM" in os.environ:
    strategy = sg.TPUStrategy(**how)
elif "TF_CONFIG" in os.environ:
    strategy = sg.MultiWorkerMirroredStrategy(**how)
else:
    strategy = sg.MirroredStrategy()
keras.utils.set_random_seed(7)
if jax.process_index() == 1:  # it has drawn something else by now, and takes process 0's values
    keras.random.normal((3,))
rng = np.random.default_rng(0)
x = rng.integers(0, 8192, (90, 3), dtype="int32")
y = rng.normal(size=(90, 1)).astype("float32")
results: dict[str, Any] = {}


def make_model() -> keras.Model:
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((3,), dtype="int32"),
                keras.layers.Embedding(8192, 16),
                keras.layers.Flatten(),
                keras.layers.Dense(64, activation="relu"),
                keras.layers.BatchNormalization(),
                keras.layers.Dense(1),
            ]
        )
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"], steps_per_execution=2)
    return model


def fitted(model: keras.Model, name: str, **arguments: Any) -> None:
    history = model.fit(x, y, batch_size=32, verbose=0, shuffle=False, **arguments).history
    results[f"{name} history"] = np.array([history[key] for key in sorted(history)])
    for index, variable in enumerate([*model.weights, *model.optimizer.variables]):
        results[f"{name} value {index}"] = np.asarray(variable.value)


def held_bytes(model: keras.Model) -> int:
    """What the first device of this process keeps between steps."""
    device = jax.local_devices()[0]
    return sum(
        shard.data.nbytes
        for variable in [*model.weights, *model.optimizer.variables]
        for shard in variable.stored.addressable_shards
        if shard.device == device
    )


def saved_and_restored(model: keras.Model) -> None:
    results["evaluate"] = np.array(model.evaluate(x, y, batch_size=32, verbose=0))
    results["predict"] = model.predict(x, batch_size=32, verbose=0)
    model.summary(print_fn=lambda *_: None)
    model.save(folder / "model.keras")
    results["loaded"] = keras.models.load_model(folder / "model.keras").predict(x, verbose=0)

    again = make_model()
    again.load_weights(folder / "epoch-2.weights.h5")
    results["weights of the last epoch"] = again.predict(x, batch_size=32, verbose=0)

    path = sg.train.Checkpoint(model=model).save(os.fspath(folder / "state"))
    fitted(model, "went on")
    other = make_model()
    sg.train.Checkpoint(model=other).restore(path)
    fitted(other, "restored and went on")


is_short = sys.argv[4:] == ["short"]
model = make_model()
saver = keras.callbacks.ModelCheckpoint(folder / "epoch-{epoch}.weights.h5", save_weights_only=True)
fitted(model, "fit", epochs=2, callbacks=[] if is_short else [saver])
results["held"] = np.array(held_bytes(model))
if not is_short:
    saved_and_restored(model)
np.savez(folder / f"process-{jax.process_index()}.npz", **results)
