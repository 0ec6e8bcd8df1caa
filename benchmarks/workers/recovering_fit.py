"""Ours: `fit` of the MLP that somebody kills and the launcher starts again.

`stratagem launch recovering_fit.py OPTIONS`: a JSON object of `folder`, with the data in `x.npy`
and `y.npy`; `end_s`, on the machine's clock; `batch_size`; `steps_per_call`; `save_freq` and
`memory_save_freq` of `BackupAndRestore`.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import stratagem as sg  # isort: skip - before keras, because it selects the JAX backend

import keras
import numpy as np

from benchmarks.workers.keras_models import build_model, compile_model, fit_arguments
from benchmarks.workers.step_lines import StepTeller
from stratagem.group.current import current_group

# All processes look at the clock together, which each time waits for the last of them.
_EPOCHS_BETWEEN_LOOKS = 4


class _Told(keras.callbacks.Callback):
    """Tells each call of the train function; ends all processes after the same epoch."""

    needs_batch_logs = False

    def __init__(self, folder: Path, end_s: float) -> None:
        super().__init__()
        group = current_group()
        assert group is not None
        self._group, self._end_s = group, end_s
        self._teller = StepTeller(folder, group.process_id)
        self._num_before = -1  # steps before this epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self._num_before < 0:
            self._num_before = int(self.model.optimizer.iterations) - batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._teller.tell(self._num_before + batch + 1)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._num_before = -1
        if epoch % _EPOCHS_BETWEEN_LOOKS:
            return
        if any(self._group.exchange("end of the benchmark", time.time() > self._end_s)):
            self.model.stop_training = True


def _main(options: dict[str, Any]) -> None:
    folder = Path(options["folder"])
    strategy = sg.MultiWorkerMirroredStrategy()
    x, y = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in "xy")
    with strategy.scope():
        model = build_model("mlp")
        compile_model(model, steps_per_call=options["steps_per_call"])
    backup = sg.BackupAndRestore(
        folder / "backup",
        options["save_freq"],
        memory_save_freq=options["memory_save_freq"],
        options=sg.train.CheckpointOptions(enable_async=True),
    )
    model.fit(
        x,
        y,
        batch_size=options["batch_size"],
        epochs=10**6,
        callbacks=[_Told(folder, options["end_s"]), backup],
        **fit_arguments(),
    )


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
