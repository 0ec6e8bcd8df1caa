"""Trains by `fit` with backups: `python backing_up.py FOLDER VICTIM [SIGNAL]`.

Process VICTIM gets the signal, SIGKILL without one, in the second epoch; -1 lets all live, and -2
makes no backups either. Process 0 writes to FOLDER/first the step from which a training went on.
Each process writes what it ended with to FOLDER/process-N.npz. With STRATAGEM_TEST_SHARD_STATE
state is in parts.
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
signum = signal.Signals[sys.argv[3]] if len(sys.argv) > 3 else signal.SIGKILL
shard_state = os.environ.get("STRATAGEM_TEST_SHARD_STATE")
strategy = sg.MultiWorkerMirroredStrategy(shard_state=shard_state)
rank = jax.process_index()
keras.utils.set_random_seed(5)
np.random.seed(rank)  # fit makes them agree

rows = np.random.default_rng(0).random((50, 4)).astype("float32")
with strategy.scope():
    model = keras.Sequential(
        [
            keras.layers.Input((4,)),
            keras.layers.Dense(8 if shard_state is None else 512),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(1),
        ]
    )
    model.compile("adam", "mse", metrics=["mae"])


class Kill(keras.callbacks.Callback):
    is_first = True

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        step = int(self.model.optimizer.iterations)
        if self.is_first and rank == 0:
            (folder / "first").write_text(str(step))
        self.is_first = False
        if rank == victim and step == 11:
            os.kill(os.getpid(), signum)


backup = sg.BackupAndRestore(
    folder / "backup",
    2,
    memory_save_freq=1,
    termination_config=sg.TerminationConfig(grace_period=0),
)
callbacks = [] if victim == -2 else [backup, Kill()]
history = model.fit(
    rows, rows.sum(axis=1), batch_size=8, epochs=3, verbose=0, callbacks=callbacks
).history
values = [*model.variables, *model.optimizer.variables]
np.savez(
    folder / f"process-{rank}.npz",
    history=np.array([history[name] for name in sorted(history)]),
    **{f"value {index}": np.asarray(one.value) for index, one in enumerate(values)},
)
