"""Reads epochs from input workers in lockstep: `python read.py NOTES FILES`.

Each rank appends a line for each step to NOTES/taken-RANK, with the examples that it got and its
position after them; a start goes on after the last step that all ranks have. Whoever reads a file
of the folder FILES leaves its process id in NOTES. Steps are slow until NOTES/hurry exists.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

notes, files = Path(sys.argv[1]), Path(sys.argv[2])
task = json.loads(os.environ["TF_CONFIG"])
rank, num_ranks = task["task"]["index"], len(task["cluster"]["worker"])
(notes / f"process-{rank}").write_text(str(os.getpid()))

import stratagem as sg  # noqa: E402 # isort: skip - before jax, because it readies the collectives

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

NUM_EPOCHS, NUM_FILES, PER_FILE, BATCH_SIZE = 2, 8, 45, 3
PAUSE_S = 0.03
# The last steps wait for the end of the faults, but never so long that a worker seems stuck.
NUM_STEPS, NUM_LAST, LAST_PAUSE_S = 240, 30, 0.5


def read(some: list[str]) -> Any:
    """Yields batches of the examples that the files name."""
    (notes / f"reader-{os.getpid()}").touch()
    for file in some:
        examples = np.array(json.loads(Path(file).read_text()))
        for start in range(0, len(examples), BATCH_SIZE):
            time.sleep(0.002)
            yield examples[start : start + BATCH_SIZE]


def write_files() -> list[str]:
    """Writes the files of examples, which rank 0 and the others may do at once."""
    files.mkdir(exist_ok=True)
    paths = [files / f"{number}.json" for number in range(NUM_FILES)]
    for number, path in enumerate(paths):
        if not path.exists():
            new = path.with_name(f"{path.name}-{rank}")
            new.write_text(json.dumps(list(range(number * PER_FILE, (number + 1) * PER_FILE))))
            new.rename(path)
    return [str(path) for path in paths]


def taken_by(one: int) -> list[bytes]:
    """Returns the whole lines of a rank; a killed one may have left a part of another."""
    path = notes / f"taken-{one}"
    return path.read_bytes().split(b"\n")[:-1] if path.exists() else []


# Nobody goes on before all have joined, so all see the same lines, cut or not.
num_done = min(len(taken_by(one)) for one in range(num_ranks))
done = taken_by(rank)[:num_done]
ledger = notes / f"taken-{rank}"
cut = notes / f"cut-{rank}"
cut.write_bytes(b"".join(line + b"\n" for line in done))
cut.rename(ledger)

strategy = sg.MultiWorkerMirroredStrategy()
dataset = sg.input.Dataset.from_files(
    write_files(), lambda some: sg.input.Dataset.from_generator(read, [some])
)
options = sg.InputOptions(input_workers=2)
batches = strategy.distribute_dataset(dataset, options)


@sg.function
def count(batch: Any) -> Any:
    """Returns the number of examples that all replicas have."""
    each = strategy.run(lambda examples: jnp.asarray(examples.shape[0]), args=(batch,))
    return strategy.reduce("SUM", each, axis=None)


iterator, epoch = iter(batches), 0
if done:
    last = json.loads(done[-1])
    epoch = last["epoch"]
    iterator.set_state(last["position"])
with ledger.open("a") as file:
    while epoch < NUM_EPOCHS:
        batch = next(iterator, None)
        if batch is None:
            iterator, epoch = iter(batches), epoch + 1
            continue
        count(batch)
        local = [np.asarray(one) for one in strategy.local_results(batch)]
        examples = [int(one) for part in local for one in part.ravel()]
        line = {"epoch": epoch, "examples": examples, "position": iterator.get_state()}
        file.write(json.dumps(line) + "\n")
        file.flush()
        num_done += 1
        if rank == 0:
            with (notes / "steps").open("a") as steps:
                steps.write(f"{num_done}\n")
        if not (notes / "hurry").exists():
            time.sleep(LAST_PAUSE_S if num_done > NUM_STEPS - NUM_LAST else PAUSE_S)
new = notes / f"new-{rank}"
new.touch()
new.rename(notes / f"end-{rank}")
