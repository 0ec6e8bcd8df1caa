"""Trains replicas that span processes, and writes what came out.

`python spanning.py DEVICES SIZE KIND FOLDER [PART]`: with TF_CONFIG on that cluster with as many
devices a worker, without it on as many devices of one process; SIZE devices a replica. KIND is
"layout", "all" for shards over the replicas too, or "sequence". PART is "loop" for a loop of the
user's, "fit" for training alone. Each process writes what it saw to FOLDER/process-N.npz.
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

num_devices, size, kind, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
part = sys.argv[5] if len(sys.argv) > 5 else "all"
jax.config.update("jax_num_cpu_devices", num_devices)
how: dict[str, Any] = {"devices_per_replica": size}
if kind == "sequence":
    how["sequence_axis"] = 1
else:
    how["layout_map"] = {".*hidden/kernel": (None, "logical")}
    if part != "loop":  # which has no other variables
        how["layout_map"] |= {
            ".*embeddings": ("logical", None),
            ".*last/kernel": ("logical", None),
        }
if kind == "all":
    how["shard_state"] = "all"
strategy: sg.Strategy
if "STRATAGEM_TPU_PLATFORM" in os.environ:
    strategy = sg.TPUStrategy(**how)
elif "TF_CONFIG" in os.environ:
    strategy = sg.MultiWorkerMirroredStrategy(**how)
else:
    strategy = sg.MirroredStrategy(**how)
keras.utils.set_random_seed(7)
if jax.process_index() == 1:  # it has drawn something else by now, and takes process 0's values
    keras.random.normal((3,))
rng = np.random.default_rng(0)
x = rng.integers(0, 16384, (42, 8), dtype="int32")
y = rng.normal(size=(42, 1)).astype("float32")
results: dict[str, Any] = {}


def make_model() -> keras.Model:
    with strategy.scope():
        tokens = keras.Input((8,), dtype="int32")
        hidden = keras.layers.Embedding(16384, 16)(tokens)  # 1 MiB: saved in shards
        hidden = keras.layers.Dense(64, activation="relu", name="hidden")(hidden)
        hidden = keras.layers.BatchNormalization()(hidden)
        hidden = keras.layers.Dropout(0.2)(hidden)
        hidden = keras.layers.GlobalAveragePooling1D()(hidden)
        model = keras.Model(tokens, keras.layers.Dense(1, name="last")(hidden))
        model.compile(
            keras.optimizers.Adam(0.01, epsilon=1e-3), "mse", metrics=["mae"], steps_per_execution=2
        )
    return model


def fitted(model: keras.Model, name: str, **arguments: Any) -> None:
    history = model.fit(x, y, batch_size=16, verbose=0, **arguments).history
    results[f"{name} history"] = np.array([history[key] for key in sorted(history)])
    for index, variable in enumerate([*model.weights, *model.optimizer.variables]):
        results[f"{name} value {index}"] = np.asarray(variable)


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
    results["evaluate"] = np.array(model.evaluate(x, y, batch_size=16, verbose=0))
    results["predict"] = model.predict(x, batch_size=16, verbose=0)
    model.save(folder / "model.keras")
    results["loaded"] = keras.models.load_model(folder / "model.keras").predict(x, verbose=0)
    path = sg.train.Checkpoint(model=model).save(os.fspath(folder / "state"))
    memory = sg.checkpoint.MemoryBackup(sg.train.Checkpoint(model=model), folder / "memory")
    memory.save(1)
    fitted(model, "went on", shuffle=False)
    other = make_model()
    sg.train.Checkpoint(model=other).restore(path)
    fitted(other, "restored and went on", shuffle=False)
    assert memory.restore() == 1
    fitted(model, "back and went on", shuffle=False)


def own_loop() -> None:
    """Batches of a dataset and of a function, in a loop of the user's."""
    with strategy.scope(), keras.name_scope("hidden"):
        weight = sg.Variable(np.ones((8, 64), np.float32), name="kernel")

    def step(batch: Any) -> Any:
        mean = keras.ops.mean(keras.ops.cast(batch, "float32") / 16384 @ weight.value)
        weight.assign_sub(0.01 * sg.get_replica_context().all_reduce("sum", mean) * weight)
        return mean

    @sg.function
    def many(batch: Any) -> Any:
        return strategy.reduce("sum", strategy.run(step, args=(batch,)), axis=None)

    def of_pipeline(context: sg.InputContext) -> Any:
        results["pipelines"] = np.array(context.num_input_pipelines)
        part = x[:36][context.input_pipeline_id :: context.num_input_pipelines]
        return sg.input.Dataset(part, batch_size=context.get_per_replica_batch_size(16))

    # A process has its own batches, so that sums over all replicas are compared.
    for name, dataset in {
        "dataset": strategy.experimental_distribute_dataset(sg.input.Dataset(x, batch_size=16)),
        "function": strategy.distribute_datasets_from_function(of_pipeline),
    }.items():
        losses = []
        for batch in dataset:
            parts = strategy.run(step, args=(batch,))
            losses.append(float(strategy.reduce("sum", parts, axis=None)))
            rows = strategy.gather(batch, axis=0)
            losses.append(float(np.asarray(rows).sum()))
            assert len(strategy.experimental_local_results(parts)) == num_local
            losses.append(float(many(batch)))
        results[f"{name} losses"] = np.array(losses)
    iterator = iter(strategy.experimental_distribute_dataset(sg.input.Dataset(x, batch_size=16)))
    of_steps = strategy.run_steps(step, iterator, 3)
    results["run_steps"] = np.asarray(strategy.reduce("sum", of_steps, axis=None))
    results["weight"] = np.asarray(weight)
    ids = strategy.distribute_values_from_function(lambda one: one.replica_id_in_sync_group + 1)
    results["ids"] = np.asarray(strategy.gather(strategy.run(lambda i: i[None], (ids,)), axis=0))


num_local = strategy.topology.num_local_replicas
if part == "loop":
    own_loop()
else:
    model = make_model()
    fitted(model, "fit", epochs=2)
    results["held"] = np.array(held_bytes(model))
    if part == "all":
        own_loop()
        saved_and_restored(model)
np.savez(folder / f"process-{jax.process_index()}.npz", **results)
