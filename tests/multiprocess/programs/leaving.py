"""Loops over each process's own data that are left early: `python leaving.py FOLDER`.

Process 0 reads ahead and process 1 does not, so that process 0 waits for the sizes of batches that
process 1 never reads. Each process writes what it saw to FOLDER/process-N.json.
"""

from __future__ import annotations

import gc
import json
import sys
import threading
from pathlib import Path

import jax
import numpy as np

import stratagem as sg

folder = Path(sys.argv[1])
strategy = sg.MultiWorkerMirroredStrategy()
rank = jax.process_index()
host = sg.collectives.host
options = sg.InputOptions(per_replica_buffer_size=0 if rank else 3)
seen: dict[str, object] = {}


def numbers(count: int) -> sg.DistributedDataset:
    """Batches of one example, another one on each process."""
    return strategy.distribute_datasets_from_function(
        lambda context: [np.array([100 * context.input_pipeline_id + i]) for i in range(count)],
        options,
    )


def total(batch: object) -> int:
    """Of the examples of all, in a step that all take part in."""
    return int(strategy.reduce("sum", batch, axis=0))


def has_come_to_rest() -> bool:
    """Whether no thread reads ahead any more."""
    gc.collect()
    threads = [t for t in threading.enumerate() if t.name == "stratagem-prefetch"]
    for thread in threads:
        thread.join(60)
    return not any(thread.is_alive() for thread in threads)


totals: list[int] = []
for batch in numbers(50):
    totals.append(total(batch))
    if len(totals) == 2:
        break
seen["left by break"] = [totals, has_come_to_rest()]
host.barrier("after the break")

iterator = iter(numbers(50))
first = total(next(iterator))
iterator.close()
seen["closed"] = [first, host.all_gather_object(rank)]

iterator = iter(numbers(50))
first = total(next(iterator))
state = iterator.get_state()
after = total(next(iterator))
iterator.set_state(state)
seen["set back"] = [first, after, total(next(iterator))]

iterator = iter(numbers(50))
first = total(next(iterator))
del iterator
seen["dropped"] = [first, has_come_to_rest()]

seen["to the end"] = [total(batch) for batch in numbers(4)]

# A program that comes apart: process 1 leaves the loop, process 0 goes on.
host.barrier("before the last loop")
iterator = iter(numbers(50))
first = total(next(iterator))
if rank == 1:
    iterator.close()
    seen["came apart"] = None
else:
    try:
        for _ in iterator:
            pass
    except RuntimeError as error:
        seen["came apart"] = str(error)
seen["and goes on"] = host.all_gather_object(rank)

# Left to the end of the process.
iterator = iter(numbers(50))
next(iterator)
(folder / f"process-{rank}.json").write_text(json.dumps(seen))
