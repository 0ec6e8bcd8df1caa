"""Trains for 200 steps, started by `stratagem launch`, while somebody kills it.

`python killed.py HOW FOLDER`, HOW is fit or loop. Each process tells its number and each step in
FOLDER/now-RANK, two integers; process 0 writes what training ended with to FOLDER/end.npz: weights,
and for each step the numbers of the examples that the replicas trained with.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
from pathlib import Path
from typing import Any

import stratagem as sg  # isort: skip - before jax, because it readies the collectives

import jax
import jax.numpy as jnp
import keras
import numpy as np

NUM_STEPS = 200
EPOCHS, BATCH_SIZE, NUM_EXAMPLES = 8, 12, 300  # 25 steps an epoch
how, folder = sys.argv[1], Path(sys.argv[2])
keras.utils.set_random_seed(7)
strategy = sg.MultiWorkerMirroredStrategy()
rank, num_replicas = jax.process_index(), strategy.num_replicas_in_sync
rows = np.random.default_rng(0).random((NUM_EXAMPLES, 5)).astype("float32")
rows[:, 0] = np.arange(NUM_EXAMPLES)
targets = rows[:, 1:].sum(axis=1, keepdims=True)


class Seen(keras.layers.Layer):
    """Notes which examples each step trains with; the first feature is their number."""

    def build(self, shape: Any) -> None:
        self.examples = sg.Variable(
            np.zeros((NUM_STEPS, num_replicas, BATCH_SIZE), "int32"),
            trainable=False,
            synchronization="on_read",
            aggregation="sum",
        )
        self.num_steps = sg.Variable(
            np.zeros((), "int32"),
            trainable=False,
            synchronization="on_read",
            aggregation="only_first_replica",
        )

    def call(self, x: Any, training: bool = False) -> Any:
        context = sg.get_replica_context()
        if training and context is not None:
            numbers = jnp.zeros((1, 1, BATCH_SIZE), "int32")
            own = jnp.asarray(x[:, 0], "int32") + 1
            numbers = numbers.at[0, 0, : own.shape[0]].set(own)
            replica = jnp.asarray(context.replica_id_in_sync_group, "int32")
            step = jnp.asarray(self.num_steps.value)
            place = (step, replica, jnp.zeros((), "int32"))
            self.examples.assign(
                jax.lax.dynamic_update_slice(jnp.asarray(self.examples.value), numbers, place)
            )
            self.num_steps.assign(step + 1)
        return x[:, 1:]


with strategy.scope():
    seen = Seen()
    model = keras.Sequential(
        [
            keras.layers.Input((5,)),
            seen,
            keras.layers.Dense(16, "relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(1),
        ]
    )
    optimizer = keras.optimizers.Adam(0.01)


class Now:
    """Where this process is, for whoever wants to kill it."""

    def __init__(self) -> None:
        path = folder / f"now-{rank}"
        with path.open("wb") as file:
            file.write(struct.pack("<QQ", 0, 0))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 16)

    def tell(self, step: int) -> None:
        self._memory[:] = struct.pack("<QQ", os.getpid(), step)


now = Now()


def fit() -> None:
    class Tell(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            now.tell(int(self.model.optimizer.iterations))

    model.compile(optimizer, "mse")
    backup = sg.BackupAndRestore(folder / "backup", save_freq=5, delete_checkpoint=False)
    model.fit(
        rows, targets, batch_size=BATCH_SIZE, epochs=EPOCHS, verbose=0, callbacks=[backup, Tell()]
    )


class Data:
    """The epoch's iterator, or the next epoch's where it has ended."""

    def __init__(self) -> None:
        dataset = sg.input.Dataset((rows, targets), batch_size=BATCH_SIZE, shuffle=True, seed=3)
        self._dataset = strategy.distribute_dataset(dataset)
        self._iterator = iter(self._dataset)

    def next(self) -> Any:
        try:
            return next(self._iterator)
        except StopIteration:
            self._iterator = iter(self._dataset)
            return next(self._iterator)

    def get_state(self) -> Any:
        return self._iterator.get_state()

    def set_state(self, state: Any) -> None:
        self._iterator.set_state(state)


def loop() -> None:
    with strategy.scope():
        optimizer.build(model.trainable_variables)
    data = Data()
    checkpoint = sg.train.Checkpoint(
        model=model, optimizer=optimizer, data=data, random=sg.train.RandomState()
    )
    manager = sg.train.CheckpointManager(
        checkpoint,
        folder / "series",
        max_to_keep=2,
        step_counter=optimizer.iterations,
        checkpoint_interval=5,
    )
    manager.restore_or_initialize()

    def replica_step(x: Any, y: Any) -> None:
        def loss() -> Any:
            return sg.compute_average_loss((model(x, training=True) - y)[:, 0] ** 2)

        _, gradients = sg.value_and_grad(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    while (step := int(optimizer.iterations)) < NUM_STEPS:
        now.tell(step)
        strategy.run(replica_step, args=data.next())
        behind = sg.train.CheckpointOptions(enable_async=step % 2 == 0)
        manager.save(options=behind)
    manager.sync()


{"fit": fit, "loop": loop}[how]()
now.tell(NUM_STEPS)
values = [np.asarray(variable.value) for variable in (*model.variables, *optimizer.variables)]
examples = np.asarray(seen.examples.value)
if rank == 0:
    np.savez(
        folder / "end.npz",
        examples=examples,
        **{f"value {index}": value for index, value in enumerate(values)},
    )
