"""Trains until a worker is lost, catches the error, and reads a result that never arrives."""

from __future__ import annotations

import os
import signal

import jax.numpy as jnp

import stratagem as sg
from stratagem.devices import processes

processes._REPORTED_GRACE_S = 2.0
# Sums of the compiler's wait inside JAX; those in shared memory end with an error.
strategy = sg.MultiWorkerMirroredStrategy(
    communication_options=sg.CommunicationOptions(implementation="NCCL")
)
with strategy.scope():
    total = sg.Variable(jnp.eye(300))


def step():
    # JAX runs a short program in the call that starts it.
    local = total.value @ jnp.eye(300)
    total.assign(sg.get_replica_context().all_reduce("MEAN", local))


try:
    for number in range(1000):
        strategy.run(step)
        if number == 5 and strategy.cluster_resolver.task_id == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
except sg.errors.UnavailableError as error:
    print("caught", "worker 1" in str(error), flush=True)
print("total", float(total.numpy().sum()))
