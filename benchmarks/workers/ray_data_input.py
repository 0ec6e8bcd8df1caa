"""Ray Data's: tasks of its executor make the batches, and a loop takes them as in Ray Train."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import ray
import ray.data

from benchmarks.input_work import make_batch
from benchmarks.workers.starved_device import StarvedOptions, serve_batches

_NUM_BATCHES = 4096
# Batches of a task, the better of 4 and 16: tasks cost time, and short ones fill a queue evenly.
_BATCHES_PER_TASK = {"jpeg": 16, "tokens": 16, "objects": 4}
_BATCHES_AHEAD_PER_WORKER = 2


def _make(work: str, rows: dict[str, Any]) -> dict[str, Any]:
    (number,) = rows["data"]
    first, second = make_batch(work, int(number))
    return {"first": first, "second": second}


@contextlib.contextmanager
def _batches(options: StarvedOptions) -> Iterator[Iterator[Any]]:
    # A task takes one CPU.
    ray.init(
        address="local",  # and no cluster that may run here
        num_cpus=options.num_workers,
        include_dashboard=False,
        object_store_memory=2**30,
        logging_level=logging.ERROR,
    )
    ray.data.DataContext.get_current().enable_progress_bars = False
    # Numbers that are there: `ray.data.range` would have a stage of tasks that read them.
    parts = np.split(np.arange(_NUM_BATCHES), _NUM_BATCHES // _BATCHES_PER_TASK[options.work])
    dataset = ray.data.from_numpy(parts).map_batches(
        functools.partial(_make, options.work), batch_size=1
    )
    batches = dataset.iter_batches(
        batch_size=len(make_batch(options.work, 0)[1]),
        prefetch_batches=_BATCHES_AHEAD_PER_WORKER * options.num_workers,
        drop_last=True,
    )
    yield ((batch["first"], batch["second"]) for batch in batches)
    os._exit(0)  # its shutdown takes seconds, and complains of the batches that were not taken


if __name__ == "__main__":
    serve_batches(_batches)
