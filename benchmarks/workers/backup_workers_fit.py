"""Ours: `fit` of the MLP under `ElasticStrategy`, whose workers pause at random.

`stratagem launch --survivors backup_workers_fit.py OPTIONS`: a JSON object of `folder`, with the
data in `x.npy` and `y.npy`; `batch_size`; `num_backup_workers`; `num_steps`, of each part; `share`
of the steps before which a worker pauses, and `pause_s`; `work_s`, a sleep in each step as if a
device computed it. The first part warms up, the second has no pauses. Worker 0 writes `times.json`.
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import stratagem as sg  # isort: skip - before keras, because it selects the JAX backend

import keras
import numpy as np

from benchmarks.workers.keras_models import build_model, compile_model, fit_arguments
from stratagem.group.current import current_group

# In it, a thread compiles the step of a worker that is left out.
_COMPILING_S = 4.0


class _Pauses(keras.callbacks.Callback):
    """Pauses, and notes when parts begin and how many take part in each step."""

    needs_batch_logs = False

    def __init__(self, strategy: Any, options: dict[str, Any]) -> None:
        super().__init__()
        self._strategy, self._options = strategy, options
        self.group: Any = current_group()
        self._chance = random.Random(self.group.member)
        self.begun_s: list[float] = []
        self.num_participants: list[int] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        step, num_steps = len(self.num_participants), self._options["num_steps"]
        if step == num_steps // 2:
            time.sleep(_COMPILING_S)
        if step % num_steps == 0 and step < 3 * num_steps:  # the last epoch has more steps
            self.begun_s.append(time.monotonic())
        if step >= 2 * num_steps and self._chance.random() < self._options["share"]:
            time.sleep(self._options["pause_s"])
        if not self.group.is_late():  # one that is left out has no work
            time.sleep(self._options["work_s"])

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.num_participants.append(len(self._strategy.participants))
        if len(self.num_participants) == 3 * self._options["num_steps"]:
            self.begun_s.append(time.monotonic())


def _main(options: dict[str, Any]) -> None:
    folder = Path(options["folder"])
    strategy = sg.ElasticStrategy(num_backup_workers=options["num_backup_workers"])
    x, y = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in "xy")
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = build_model("mlp")
        compile_model(model, steps_per_call=1)
    pauses = _Pauses(strategy, options)
    steps_per_epoch = len(x) // options["batch_size"]
    model.fit(
        x,
        y,
        batch_size=options["batch_size"],
        epochs=-(-3 * options["num_steps"] // steps_per_epoch),
        callbacks=[pauses],
        **fit_arguments(),
    )
    if pauses.group.member == 0:
        last = 3 * options["num_steps"]
        told = {"begun_s": pauses.begun_s, "num_participants": pauses.num_participants[:last]}
        (folder / "times.json").write_text(json.dumps(told), encoding="ascii")


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
