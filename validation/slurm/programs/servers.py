"""Trains on parameter servers, with backups; `python servers.py FOLDER [SECONDS_PER_STEP]`."""

from __future__ import annotations

import socket
import sys
import time
from pathlib import Path

import keras
import numpy as np

import stratagem as sg

folder = Path(sys.argv[1])
step_s = float(sys.argv[2]) if len(sys.argv) > 2 else 0.0


class Pace(keras.callbacks.Callback):
    """Makes each step last, and says which steps run."""

    has_begun = False

    def on_train_batch_begin(self, batch, logs=None) -> None:
        if not self.has_begun:  # the backup is restored by now
            self.has_begun, begin = True, int(self.model.optimizer.iterations)
            print(f"coordinator on {socket.gethostname()} begins at step {begin}", flush=True)
            (folder / "begun").touch()

    def on_train_batch_end(self, batch, logs=None) -> None:
        time.sleep(step_s)


def main() -> None:
    strategy = sg.ParameterServerStrategy()
    print(strategy.cluster_resolver.cluster_spec().as_dict(), flush=True)
    keras.utils.set_random_seed(7)
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
    rows = np.random.default_rng(0).random((64, 4)).astype("float32")
    backup = sg.BackupAndRestore(
        str(folder / "backup"), save_freq=4, termination_config=sg.TerminationConfig()
    )
    before = model.evaluate(rows, rows[:, :2], batch_size=8, verbose=0)
    model.fit(rows, rows[:, :2], batch_size=8, epochs=3, verbose=0, callbacks=[Pace(), backup])
    after = model.evaluate(rows, rows[:, :2], batch_size=8, verbose=0)
    steps = int(model.optimizer.iterations)
    print(f"coordinator ends at step {steps}; loss {before:.4f} to {after:.4f}", flush=True)
    (folder / "losses").write_text(f"{before} {after} {steps}")
    strategy.close()


if __name__ == "__main__":
    main()
