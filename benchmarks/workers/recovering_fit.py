"""Ours: `fit` of the MLP that somebody kills and the launcher starts again.

`stratagem launch recovering_fit.py OPTIONS`: a JSON object of `batch_size` and `folder`, beside
which the data is in `x.npy` and `y.npy`. The state of each step is kept in memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import stratagem as sg  # isort: skip - before keras, because it selects the JAX backend

import jax
import keras
import numpy as np

from benchmarks.workers.keras_models import build_model, compile_model, fit_arguments
from benchmarks.workers.protocol import StepTeller, arguments
from benchmarks.workloads import WORKLOADS


class _TellsSteps(keras.callbacks.Callback):
    needs_batch_logs = False

    def __init__(self, folder: Path, rank: int) -> None:
        super().__init__()
        self._teller = StepTeller(folder, rank)
        self._num_before = -1  # steps before this epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self._num_before < 0:
            model: Any = self.model
            self._num_before = int(model.optimizer.iterations) - batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._teller.tell(self._num_before + batch + 1)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._num_before = -1


def _main(options: dict[str, Any]) -> None:
    folder = Path(options["folder"])
    strategy = sg.MultiWorkerMirroredStrategy()
    x, y = (np.load(folder.parent / f"{name}.npy", mmap_mode="r") for name in "xy")
    with strategy.scope():
        model = build_model(WORKLOADS["mlp"])
        compile_model(model, WORKLOADS["mlp"], steps_per_call=1)
    backup = sg.BackupAndRestore(
        folder / "backup",
        "epoch",
        memory_save_freq=1,
        options=sg.train.CheckpointOptions(enable_async=True),
    )
    model.fit(
        x,
        y,
        batch_size=options["batch_size"],
        epochs=10**6,
        callbacks=[_TellsSteps(folder, jax.process_index()), backup],
        **fit_arguments(),
    )


if __name__ == "__main__":
    _main(arguments())
