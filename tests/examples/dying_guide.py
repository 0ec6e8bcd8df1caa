"""Runs a guide whose second worker is killed in the midst of it, as a machine that is lost.

    python dying_guide.py PLACE GUIDE [ARGUMENTS]

PLACE is "fit", before the 101st step of the first `fit` with backups, or "save", once the first
checkpoint was saved.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
from typing import Any

import stratagem as sg


def _die() -> None:
    if json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 1:
        os.kill(os.getpid(), signal.SIGKILL)


class DyingBackup(sg.BackupAndRestore):
    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        super().on_train_batch_begin(batch, logs)
        if int(self.model.optimizer.iterations) == 100:
            _die()


class DyingManager(sg.train.CheckpointManager):
    def save(self, *args: Any, **kwargs: Any) -> str | None:
        path = super().save(*args, **kwargs)
        _die()
        return path


if __name__ == "__main__":
    place, *sys.argv = sys.argv[1:]
    if place == "fit":
        sg.BackupAndRestore = DyingBackup  # type: ignore[misc]
    else:
        sg.train.CheckpointManager = DyingManager  # type: ignore[misc]
    runpy.run_path(sys.argv[0], run_name="__main__")
