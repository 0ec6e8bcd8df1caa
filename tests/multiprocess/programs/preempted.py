"""Trains under the watch of a PreemptionCheckpointHandler; a variable counts steps on each replica.

`python preempted.py FOLDER HOW`. With NOTICES as JSON, [[worker, step, "after"], ...], a worker
sends itself SIGTERM when it has done so many steps; with "inside" while it does the next one. HOW
is what happens then, beside saving:

save: nothing more. die in save, die at exit: worker CULPRIT does. error: there is no notice, and
a step of worker CULPRIT fails. grace: there is time for some more steps. checkpoint: it is saved.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp

import stratagem as sg

NUM_EPOCHS, NUM_STEPS = 8, 15

folder, how = Path(sys.argv[1]), sys.argv[2]
notices = json.loads(os.environ.get("NOTICES", "[]"))
strategy = sg.MultiWorkerMirroredStrategy()
index = jax.process_index()
is_culprit = index == int(os.environ.get("CULPRIT", "-1"))
with strategy.scope():
    counted = sg.Variable(0, dtype="int32", aggregation=sg.VariableAggregation.SUM)
    first = sg.VariableAggregation.ONLY_FIRST_REPLICA
    epoch = sg.Variable(0, dtype="int32", aggregation=first)
    step_in_epoch = sg.Variable(0, dtype="int32", aggregation=first)


def notice(when: str) -> None:
    for _ in range(notices.count([index, handler.total_run_calls, when])):
        send = threading.Thread(target=os.kill, args=(os.getpid(), signal.SIGTERM))
        send.start()
        if when == "after":
            send.join()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def note_save() -> None:
    """In place of a checkpoint, for what is about the agreement alone."""
    with (folder / f"saved-{index}.jsonl").open("a") as lines:
        lines.write(json.dumps([handler.total_run_calls, int(counted)]) + "\n")
    if how == "die in save" and is_culprit:
        die()


def leave() -> None:
    if how == "die at exit" and is_culprit:
        die()
    sys.exit(42)


def count() -> None:
    counted.assign_add(jnp.ones((), "int32"))


def train_step() -> None:
    if how == "error" and is_culprit and handler.total_run_calls == 20:
        raise ValueError("a bug of one worker")
    notice("inside")
    strategy.run(count)


config = sg.TerminationConfig(save_fn=note_save, exit_fn=leave)
if how == "grace":
    config = sg.TerminationConfig(save_fn=note_save, grace_period=1.0)
if how == "checkpoint":
    config = None
checkpoint = sg.train.Checkpoint(counted=counted, epoch=epoch, step_in_epoch=step_in_epoch)
handler = sg.PreemptionCheckpointHandler(
    strategy.cluster_resolver, checkpoint, folder / "checkpoints", config
)
print("joined", flush=True)
notice("after")
while int(epoch) < NUM_EPOCHS:
    while int(step_in_epoch) < NUM_STEPS:
        handler.run(train_step)
        step_in_epoch.assign_add(1)
        notice("after")
        print(f"step {handler.total_run_calls}", flush=True)
        if how == "grace":  # a step takes a part of the grace
            time.sleep(0.05)
    epoch.assign_add(1)
    step_in_epoch.assign(0)
print(f"done {int(counted)}", flush=True)
