"""Trains a small model for a fixed number of steps: `python fit.py NOTES FOLDER OPTIONS`.

Rank 0 appends a line for each step to NOTES/steps; each worker writes its process id to
NOTES/process-RANK and, at the end, its weights to NOTES/end-RANK.npz. Steps are slow until
NOTES/hurry exists. OPTIONS is a JSON object for `BackupAndRestore`, with the rate of dropout.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

notes, folder, options = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
task = json.loads(os.environ["TF_CONFIG"])["task"]
(notes / f"process-{task['index']}").write_text(str(os.getpid()))

import stratagem as sg  # noqa: E402 # isort: skip - before jax, because it readies the collectives

import jax  # noqa: E402
import keras  # noqa: E402
import numpy as np  # noqa: E402

EPOCHS, BATCH_SIZE, NUM_EXAMPLES = 6, 12, 476  # 40 steps an epoch, the last one uneven
PAUSE_S = 0.03
# The last steps wait for the end of the faults, but never so long that a worker seems stuck.
NUM_LAST, LAST_PAUSE_S = 60, 0.5

strategy = sg.MultiWorkerMirroredStrategy()
rank = jax.process_index()
keras.utils.set_random_seed(7)
rows = np.random.default_rng(0).random((NUM_EXAMPLES, 4)).astype("float32")
targets = rows.sum(axis=1, keepdims=True)


class Pace(keras.callbacks.Callback):
    """Records steps, and slows them down while faults are to come."""

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Appends the number of the step."""
        step = int(self.model.optimizer.iterations)
        if rank == 0:
            with (notes / "steps").open("a") as file:
                file.write(f"{step}\n")
        if not (notes / "hurry").exists():
            is_last = step > EPOCHS * 40 - NUM_LAST
            time.sleep(LAST_PAUSE_S if is_last else PAUSE_S)


with strategy.scope():
    dropout = keras.layers.Dropout(options.pop("dropout"))
    layers = [keras.layers.Dense(8, "relu"), dropout, keras.layers.Dense(1)]
    model = keras.Sequential([keras.layers.Input((4,)), *layers])
    model.compile("adam", "mse")
checkpoint_options = sg.train.CheckpointOptions(enable_async=options.pop("enable_async"))
termination = sg.TerminationConfig() if options.pop("saves_on_notice") else None
backup = sg.BackupAndRestore(
    folder, options=checkpoint_options, termination_config=termination, **options
)
model.fit(
    rows, targets, batch_size=BATCH_SIZE, epochs=EPOCHS, verbose=0, callbacks=[backup, Pace()]
)
values = [np.asarray(variable.value) for variable in (*model.variables, *model.optimizer.variables)]
new = notes / f"new-{rank}.npz"
np.savez(new, *values)
new.rename(notes / f"end-{rank}.npz")
