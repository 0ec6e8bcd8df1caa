"""`fit` of a small model until told to end; it backs up each 100 steps.

`stratagem launch lockstep_program.py FOLDER`: ends once FOLDER/end exists.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import stratagem as sg  # isort: skip - before keras, because it selects the JAX backend

import keras
import numpy as np

from stratagem.group.current import current_group

_STEP_S = 0.05
_STEPS_PER_EPOCH = 100


class _Paced(keras.callbacks.Callback):
    """Spares the machine; ends all processes after the same epoch."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        group = current_group()
        assert group is not None
        self._group, self._folder = group, folder
        (folder / f"worker-{group.process_id}.pid").write_text(str(os.getpid()))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        time.sleep(_STEP_S)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        (self._folder / f"steps-{self._group.process_id}").write_text(
            str(int(self.model.optimizer.iterations))
        )
        if any(self._group.exchange("end of the soak", (self._folder / "end").exists())):
            self.model.stop_training = True


def _main(folder: Path) -> None:
    strategy = sg.MultiWorkerMirroredStrategy()
    random = np.random.default_rng(0)
    x = random.normal(size=(32 * _STEPS_PER_EPOCH, 64)).astype("float32")
    y = random.integers(0, 10, len(x))
    with strategy.scope():
        model = keras.Sequential(
            [keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)]
        )
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    backup = sg.BackupAndRestore(folder / "backup", save_freq=100)
    model.fit(x, y, batch_size=32, epochs=10**6, verbose=0, callbacks=[_Paced(folder), backup])


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
