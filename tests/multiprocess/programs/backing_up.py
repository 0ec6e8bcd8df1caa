"""Trains by `fit` with backups: `python backing_up.py FOLDER VICTIM`.

Process VICTIM kills itself in the second epoch; -1 lets all live, and -2 makes no backups either.
Each process writes what it ended with to FOLDER/process-N.npz.
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

folder, victim = Path(sys.argv[1]), int(sys.argv[2])
strategy = sg.MultiWorkerMirroredStrategy()
rank = jax.process_index()
keras.utils.set_random_seed(5)
np.random.seed(rank)  # fit makes them agree

rows = np.random.default_rng(0).random((50, 4)).astype("float32")
with strategy.scope():
    model = keras.Sequential(
        [
            keras.layers.Input((4,)),
            keras.layers.Dense(8),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(1),
        ]
    )
    model.compile("adam", "mse", metrics=["mae"])


class Kill(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if rank == victim and int(self.model.optimizer.iterations) == 11:
            os.kill(os.getpid(), signal.SIGKILL)


callbacks = [] if victim == -2 else [sg.BackupAndRestore(folder / "backup", 2), Kill()]
history = model.fit(
    rows, rows.sum(axis=1), batch_size=8, epochs=3, verbose=0, callbacks=callbacks
).history
values = [*model.variables, *model.optimizer.variables]
np.savez(
    folder / f"process-{rank}.npz",
    history=np.array([history[name] for name in sorted(history)]),
    **{f"value {index}": np.asarray(one.value) for index, one in enumerate(values)},
)
