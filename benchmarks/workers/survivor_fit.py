"""Ours: `fit` of the MLP under `ElasticStrategy`, whose workers are killed and join again.

`stratagem launch --survivors survivor_fit.py OPTIONS`: a JSON object of `folder`, with the data in
`x.npy` and `y.npy`; `batch_size`; `step_s`, the least time of a step, as if a device computed it
while the cores are free; and for a replay `epochs`, `kills` as pairs of a worker and a
step, and `joins`, the steps before which a worker joins. Without `epochs`, it ends with the epoch
in which the file `stop` appears.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import stratagem as sg  # isort: skip - before keras, because it selects the JAX backend

import keras
import numpy as np

from benchmarks.workers.keras_models import build_model, compile_model, fit_arguments
from stratagem.group.current import current_group
from stratagem.group.elastic.joining import Admissions
from stratagem.group.elastic.views import View

# Steps before one at which a worker joins, from which on the others wait for it in a replay.
_AHEAD = 3


class _Recorder(keras.callbacks.Callback):
    """Records each step with its participants, and the bits of the weights after each epoch."""

    needs_batch_logs = False

    def __init__(self, strategy: Any, folder: Path, options: dict[str, Any]) -> None:
        super().__init__()
        self._strategy, self._stop = strategy, folder / "stop"
        self._group: Any = current_group()
        own = self._group.member
        self._kills = {step for worker, step in options["kills"] if worker == own}
        self._joins = {step - _AHEAD for step in options["joins"]}
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._file = os.open(folder / f"steps-{own}", flags, 0o644)
        self._bits = os.open(folder / f"bits-{own}", flags, 0o644)
        (folder / f"pid-{own}").write_text(str(os.getpid()), encoding="ascii")
        self._least_s, self._begun_s = options["step_s"], 0.0
        self._step: int | None = None
        self._is_in_step = False

    @property
    def next_step(self) -> int | None:
        """Step before which processes that are admitted now join."""
        return None if self._step is None else self._step + self._is_in_step

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        model: Any = self.model
        if self._step is None:
            self._step = int(model.optimizer.iterations)
        time.sleep(max(0.0, self._begun_s + self._least_s - time.monotonic()))
        self._begun_s = time.monotonic()
        if self._step in self._joins and self._group.view.members[0] == self._group.member:
            while not self._has_candidate():
                time.sleep(0.002)
        if self._step in self._kills:
            os.kill(os.getpid(), signal.SIGKILL)
        self._is_in_step = True

    def _has_candidate(self) -> bool:
        safe, members = self._group.admissions.safe, self._group.view.members
        return safe is not None and self._group._inbox.has_candidate(safe.place, members)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        assert self._step is not None
        who = ",".join(map(str, self._strategy.participants))
        line = f"{os.getpid()} {self._step} {time.time():.6f} {who}\n"
        os.write(self._file, line.encode())
        self._step += 1
        self._is_in_step = False

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        bits = 0
        model: Any = self.model
        for variable in [*model.variables, *model.optimizer.variables]:
            bits = zlib.crc32(variable.numpy().tobytes(), bits)
        os.write(self._bits, f"{epoch} {bits:08x}\n".encode())
        if any(self._group.exchange("end of the benchmark", self._stop.exists())):
            model.stop_training = True


def _join_only_at(steps: Sequence[int]) -> None:
    """Lets workers join before these steps alone."""
    wanted = {*steps}
    note, begin_view = Admissions.note, Admissions.begin_view

    def noted(self: Admissions, flags: Sequence[int]) -> None:
        note(self, flags)
        self.is_change_due = self.is_change_due and _recorders[0].next_step in wanted

    def began(self: Admissions, view: View) -> None:
        begin_view(self, view)
        self.is_change_due = self.is_change_due and _recorders[0].next_step in wanted

    Admissions.note, Admissions.begin_view = noted, began  # ty: ignore


_recorders: list[_Recorder] = []


def _main(options: dict[str, Any]) -> None:
    folder = Path(options["folder"])
    strategy = sg.ElasticStrategy()
    x, y = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in "xy")
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = build_model("mlp")
        compile_model(model, steps_per_call=1)
    _recorders.append(_Recorder(strategy, folder, options))
    if options["epochs"] is not None:
        _join_only_at(options["joins"])
    model.fit(
        x,
        y,
        batch_size=options["batch_size"],
        epochs=options["epochs"] or 10**6,
        callbacks=[_recorders[0]],
        **fit_arguments(),
    )


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
