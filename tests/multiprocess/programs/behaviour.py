"""What users meet on a cluster, in one start of it: `python behaviour.py FOLDER`.

Each process writes what it saw to FOLDER/process-N.json.
"""

from __future__ import annotations

import gc
import json
import shutil
import sys
from pathlib import Path

import jax
import keras
import numpy as np

import stratagem as sg
from stratagem.group.current import current_group

folder = Path(sys.argv[1])
strategy = sg.MultiWorkerMirroredStrategy()
rank = jax.process_index()
host = sg.collectives.host
seen: dict[str, object] = {
    "gathered": host.all_gather_object({"rank": rank}),
    "broadcast": host.broadcast_object(["from", rank]),
    "replicas": strategy.num_replicas_in_sync,
    "task": [strategy.cluster_resolver.task_type, strategy.cluster_resolver.task_id],
}
host.barrier("a place of the user's")


def ids_of(dataset: sg.DistributedDataset) -> list[list[list[int]]]:
    """The examples of each step, a list for each replica."""
    steps = []
    for batch in dataset:
        parts = [np.asarray(part).tolist() for part in strategy.local_results(batch)]
        steps.append([part for own in host.all_gather_object(parts) for part in own])
    return steps


lengths = {"a": 5, "b": 9, "c": 2, "d": 1, "e": 7}
starts = dict(zip(lengths, np.cumsum([0, *lengths.values()]).tolist(), strict=False))


def read(names: list[str]) -> sg.input.Dataset:
    rows = [np.arange(starts[name], starts[name] + lengths[name]) for name in names]
    return sg.input.Dataset(np.concatenate(rows), batch_size=4)


files = sg.input.Dataset.from_files(list(lengths), read)
seen["by file"] = ids_of(strategy.distribute_dataset(files))
seen["by data"] = ids_of(strategy.distribute_dataset([np.arange(5), np.arange(5, 8)]))
seen["from function"] = ids_of(
    strategy.distribute_datasets_from_function(
        lambda context: [
            np.arange(2) + 10 * context.input_pipeline_id + 2 * step
            for step in range(1 + 2 * context.input_pipeline_id)
        ]
    )
)

# The constant model: it says 1 to all of the targets 0 to 7.
with strategy.scope():
    constant = keras.Sequential(
        [
            keras.layers.Input((1,)),
            keras.layers.Dense(1, use_bias=False, kernel_initializer="ones"),
        ]
    )
    constant.compile(keras.optimizers.SGD(0.0), "mae", metrics=["mse"])
x, y = np.ones((8, 1), "float32"), np.arange(8, dtype="float32").reshape(8, 1)
csv, best = folder / f"log-{rank}.csv", folder / "best.keras"
history = constant.fit(
    x,
    y,
    batch_size=4,
    epochs=2,
    verbose=2,
    callbacks=[keras.callbacks.CSVLogger(str(csv)), keras.callbacks.ModelCheckpoint(str(best))],
)
seen["fit loss"] = history.history["loss"]
seen["evaluate"] = constant.evaluate(x, y, batch_size=4, verbose=0)
seen["wrote"] = [csv.exists(), best.exists()]

constant.reset_metrics()
constant.train_on_batch(x, y)
group = current_group()
before = group.num_steps
seen["results"] = {name: float(value) for name, value in constant.get_metrics_result().items()}
seen["programs of the results"] = group.num_steps - before


class Doubled(keras.Sequential):
    """Reports twice its metrics."""

    def get_metrics_result(self) -> dict[str, object]:
        return {name: 2 * value for name, value in super().get_metrics_result().items()}


with strategy.scope():
    doubled = Doubled(constant.layers)
    doubled.compile(keras.optimizers.SGD(0.0), "mae", metrics=["mse"])
seen["doubled"] = doubled.fit(x, y, batch_size=4, verbose=0).history
doubled.reset_metrics()
doubled.train_on_batch(x, y)
before = group.num_steps
doubled.get_metrics_result()
seen["programs of doubled results"] = group.num_steps - before


# Metrics whose results are structures, and steps that report them, beside the same in one process.
class InForm(keras.metrics.Mean):
    """The mean of the labels in a form of its own."""

    def __init__(self, form: str) -> None:
        super().__init__(name=form)
        self.form = form

    def update_state(self, y_true, y_pred, sample_weight=None) -> None:
        super().update_state(y_true)

    def result(self) -> object:
        mean = super().result()
        return {
            "dict": {"mean": mean, "twice": 2 * mean},
            "nested": {"outer": {"inner": mean}, "beside": 3 * mean},
            "vector": keras.ops.stack([mean, 4 * mean]),
            "pair": (mean, 5 * mean),
            "empty": {},
        }[self.form]


class OwnMetrics(keras.Sequential):
    """Adds a structure of its own to the logs of Keras's steps."""

    def compute_metrics(self, x, y, y_pred, sample_weight=None) -> dict[str, object]:
        logs = super().compute_metrics(x, y, y_pred, sample_weight)
        return {**logs, "own": {"part": {"mean": keras.ops.mean(y), "pair": [keras.ops.sum(x)]}}}


class OnlyMetrics(keras.Sequential):
    """Reports its metrics in a structure."""

    def compute_metrics(self, x, y, y_pred, sample_weight=None) -> dict[str, object]:
        return {"all": super().compute_metrics(x, y, y_pred, sample_weight)}


class WithBatchLogs(keras.callbacks.Callback):
    """Keeps the logs of batches."""

    def __init__(self) -> None:
        super().__init__()
        self.of_batches: list[object] = []

    def on_train_batch_end(self, batch, logs=None) -> None:
        self.of_batches.append(dict(logs))

    on_test_batch_end = on_train_batch_end


def logs_of(kind: type[keras.Sequential]) -> dict[str, object]:
    """The logs of each way to get some."""
    forms = ["dict", "nested", "vector", "pair", "empty"]
    model = kind([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="ones")])
    model.compile("sgd", "mse", metrics=[InForm(form) for form in forms])
    fit, test = WithBatchLogs(), WithBatchLogs()
    data = (x, y)
    in_order = {"verbose": 0, "shuffle": False}
    logs = {
        "fit": model.fit(*data, epochs=2, validation_data=data, **in_order).history,
        "fit with batches": model.fit(*data, 4, callbacks=[fit], **in_order).history,
        "batches of fit": fit.of_batches,
        "evaluate": model.evaluate(*data, verbose=0, return_dict=True),
        "evaluate with batches": model.evaluate(
            *data, 4, verbose=0, callbacks=[test], return_dict=True
        ),
        "batches of evaluate": test.of_batches,
        "train_on_batch": model.train_on_batch(*data, return_dict=True),
        "test_on_batch": model.test_on_batch(*data, return_dict=True),
    }
    return jax.tree.map(lambda leaf: np.asarray(leaf, "float64").tolist(), logs)


kinds = {"Keras's": keras.Sequential, "own": OwnMetrics, "only": OnlyMetrics}
with strategy.scope():
    structured = {name: logs_of(kind) for name, kind in kinds.items()}
seen["structured logs"] = [structured, {name: logs_of(kind) for name, kind in kinds.items()}]

# A part of the data on each process, as with Horovod: refused, unless it is said to be one.
own = x[rank::2] * 0 + rank, y[rank::2]
size = {"batch_size": 2, "verbose": 0}
own_batches = sg.input.Dataset(own, batch_size=2)
off = sg.InputOptions(auto_shard_policy=sg.AutoShardPolicy.OFF)
calls = {
    "fit": lambda: constant.fit(*own, **size),
    "weights": lambda: constant.fit(x, y, sample_weight=y[:, 0] + rank, **size),
    "validation": lambda: constant.fit(x, y, validation_data=own, **size),
    "evaluate": lambda: constant.evaluate(*own, **size),
    "predict": lambda: constant.predict(own[0], **size),
    "dataset": lambda: constant.fit(own_batches, verbose=0),
    "the same": lambda: constant.fit(x, y, **size),
    "generator": lambda: constant.fit((own for _ in range(2)), verbose=0),
    "function": lambda: constant.fit(
        strategy.distribute_datasets_from_function(lambda context: own_batches), verbose=0
    ),
    "off": lambda: constant.fit(strategy.distribute_dataset(own_batches, off), verbose=0),
}
refused: dict[str, str] = {}
for name, call in calls.items():
    try:
        call()
        refused[name] = ""
    except ValueError as error:
        refused[name] = str(error).partition("\n")[0]
seen["refused data"] = refused

# Nobody has set a seed.
with strategy.scope():
    drawn = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(4)])
    numpy_drawn = sg.Variable(np.random.default_rng().normal(size=3))
seen["weights"] = [float(np.sum(w)) for w in drawn.get_weights()]
seen["weights of NumPy"] = np.asarray(numpy_drawn.value).tolist()

# TensorFlow's guides: each worker but the chief saves to a folder of its own, and deletes it.
own_folder = folder / "guide" if rank == 0 else folder / "guide" / f"workertemp_{rank}"
own_folder.mkdir(parents=True, exist_ok=True)
checkpoint = sg.train.Checkpoint(model=drawn)
manager = sg.train.CheckpointManager(checkpoint, own_folder, max_to_keep=1)
written = [manager.save(), checkpoint.write(own_folder / "written")]
# What is not saved may be alive on one process and collected on another.
with strategy.scope():
    collected = keras.layers.BatchNormalization()
    collected.build((None, 3))
if rank == 0:
    del collected
    gc.collect()
drawn.save(own_folder / "model.keras")
seen["paths of the guide"] = [*written, *manager.checkpoints]
seen["paths exist"] = [Path(path).is_dir() for path in written]
if rank:
    shutil.rmtree(own_folder)
host.barrier("cleaned up")
before = drawn.get_weights()
drawn.layers[0].kernel.assign(drawn.layers[0].kernel * 0)
checkpoint.restore(written[0])
seen["restored"] = all(map(np.array_equal, before, drawn.get_weights()))

# Behind training, too, each process is told what process 0 writes.
behind = sg.train.CheckpointOptions(enable_async=True)
written = checkpoint.write(own_folder / "behind", behind)
checkpoint.sync()
seen["path behind training"] = [written, Path(written).is_dir()]


def own_part() -> jax.Array:
    replica = sg.get_replica_context().replica_id_in_sync_group
    return jax.numpy.full(2, 1.0) + jax.numpy.asarray(replica, "float32")


# Process 0 saves what it has and what it gathers, and the next values do not change that.
sharded_strategy = sg.MultiWorkerMirroredStrategy(shard_state="all")
with sharded_strategy.scope():
    table = sg.Variable(np.arange(2**17, dtype="float32"))
    twins = [
        keras.Sequential([keras.Input((1024,)), keras.layers.Dense(128, name="a")], name="twin")
        for _ in range(2)
    ]
# Two have the same paths, and the first is alive on one process and collected on another.
if rank == 0:
    del twins[0]
    gc.collect()
twins[-1].layers[0].kernel.assign(twins[-1].layers[0].kernel * 2)
twins[-1].save(folder / "twin.keras")
read_twin = keras.models.load_model(folder / "twin.keras")
seen["twin in parts"] = [
    not twins[-1].layers[0].kernel.stored.is_fully_replicated,
    all(map(np.array_equal, read_twin.get_weights(), twins[-1].get_weights())),
]
with strategy.scope():
    sums = sg.Variable(0.0, synchronization="on_read", aggregation="sum", trainable=False)
strategy.run(lambda: sums.assign_add(own_part()[0]))
several = sg.train.Checkpoint(table=table, sums=sums, model=drawn)
seen["is sharded"] = not table.stored.is_fully_replicated
path = several.write(own_folder / "copied", behind)
for variable in (table, sums, drawn.layers[0].kernel):
    variable.assign(variable.value * 0)
several.sync()
several.read(path, sg.train.CheckpointOptions(restore_components=True)).assert_consumed()
seen["restored copies"] = [
    bool(np.array_equal(table.value, np.arange(2.0**17))),
    float(sums.value),
    all(map(np.array_equal, before, drawn.get_weights())),
]

# A model that is built in a step, and one more in fit; then no process needs the folder.
with strategy.scope():
    in_step = keras.Sequential([keras.layers.Dense(4)])
    in_fit = keras.Sequential([keras.layers.Dense(4)])
    in_fit.compile(keras.optimizers.SGD(0.0), "mse")
waiting = [sg.train.Checkpoint(model=one) for one in (in_step, in_fit)]
statuses = [one.restore(written) for one in waiting]
host.barrier("restored")
if rank == 0:
    shutil.rmtree(written)
strategy.run(in_step, args=(np.ones((2, 3), "float32"),))
in_fit.fit(np.ones((4, 3), "float32"), np.ones((4, 4), "float32"), batch_size=4, verbose=0)
for status in statuses:
    status.assert_nontrivial_match().expect_partial()
seen["restored when built"] = [
    all(map(np.array_equal, before, one.get_weights())) for one in (in_step, in_fit)
]

parts = strategy.run(own_part)
tree = sg.train.Checkpoint(state={"parts": parts, "step": 7})
kept = tree.write(own_folder / "tree")
tree.state = {"parts": strategy.run(lambda: jax.numpy.zeros(2)), "step": 0}
tree.restore(kept).assert_consumed()
(part,) = strategy.local_results(tree.state["parts"])
seen["pytree"] = [np.asarray(part).tolist(), tree.state["step"]]

(folder / f"process-{rank}.json").write_text(json.dumps(seen))
