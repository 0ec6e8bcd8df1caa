"""Ours: the first step of `fit` by a worker of `stratagem launch`, or by a process alone.

Its arguments are a folder, which gets a file with the end of the step on the machine's monotonic
clock, and options as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from benchmarks.workers.protocol import WorkerOptions

import stratagem as sg  # isort: skip - before keras, because it selects the JAX backend

from benchmarks.workers.stratagem_fit import prepare_under

__all__: list[str] = []


def _main(folder: Path, options: WorkerOptions) -> None:
    training = prepare_under(sg.MultiWorkerMirroredStrategy(), options)
    training.run_epochs(1)
    end_s = time.monotonic()
    (folder / str(os.getpid())).write_text(str(end_s), encoding="utf-8")


if __name__ == "__main__":
    _main(Path(sys.argv[1]), WorkerOptions(**json.loads(sys.argv[2])))
