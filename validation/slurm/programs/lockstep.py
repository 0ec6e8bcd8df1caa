"""Trains a few steps in lockstep, with backups; `python lockstep.py FOLDER [SECONDS_PER_STEP]`.

Each rank writes its weights to FOLDER/rank-N.npy, and prints where it runs and begins. An element
of an array has a folder of its own in FOLDER. With CRASHES_ONCE, the last rank fails in its first
start.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path

import jax
import keras
import numpy as np

import stratagem as sg

folder = Path(sys.argv[1]) / os.environ.get("SLURM_ARRAY_TASK_ID", "")
folder.mkdir(exist_ok=True)
step_s = float(sys.argv[2]) if len(sys.argv) > 2 else 0.0
jax.config.update("jax_num_cpu_devices", 1)
strategy = sg.MultiWorkerMirroredStrategy()
rank, size = jax.process_index(), jax.process_count()
keras.utils.set_random_seed(7)
with strategy.scope():
    layers = [keras.layers.Input((4,)), keras.layers.Dropout(0.2), keras.layers.Dense(2)]
    model = keras.Sequential(layers)
    model.compile("adam", "mse")


class Pace(keras.callbacks.Callback):
    """Makes each step last, so that a notice comes before the end; says which steps run."""

    has_begun = False

    def on_train_batch_begin(self, batch, logs=None) -> None:
        if not self.has_begun:  # the backup is restored by now
            self.has_begun, begin = True, int(self.model.optimizer.iterations)
            where = f"rank {rank} of {size} on {socket.gethostname()}"
            print(f"{where} begins at step {begin}", flush=True)
            (folder / f"begun-{rank}").touch()

    def on_train_batch_end(self, batch, logs=None) -> None:
        time.sleep(step_s)
        crashed = folder / "crashed"
        if "CRASHES_ONCE" in os.environ and rank == size - 1 and not crashed.exists():
            crashed.touch()
            raise OSError("the disk of this rank is gone")


rows = np.random.default_rng(0).random((64, 4)).astype("float32")
backup = sg.BackupAndRestore(
    str(folder / "backup"), save_freq=4, termination_config=sg.TerminationConfig()
)
model.fit(rows, rows[:, :2], batch_size=8, epochs=3, verbose=0, callbacks=[Pace(), backup])
weights = np.concatenate([np.ravel(np.array(weight.value)) for weight in model.weights])
np.save(folder / f"rank-{rank}.npy", weights)
address = strategy.cluster_resolver.processes().coordinator_address
print(
    f"rank {rank} of {size} ends at step {int(model.optimizer.iterations)}; {address}", flush=True
)
