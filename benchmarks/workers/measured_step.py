"""Trains for a moment on one device, and tells how much of its memory was taken.

A GPU tells the most that was ever taken. A CPU does not: there it is what the compiler of the very
program that ran states, and the batch that `fit` loads ahead.
"""

from __future__ import annotations

from typing import Any

from benchmarks.workers.protocol import WorkerOptions, answer_once
from benchmarks.workloads import workload_of

import stratagem as sg  # isort: skip - before keras, because it selects the JAX backend
import jax
import numpy as np

from benchmarks.workers.keras_models import build_model, compile_model, fit_arguments
from stratagem.execution.tracing.arguments import batch_arguments
from stratagem.input.batches import take_batch
from stratagem.input.placement import place
from stratagem.keras.training.replica_steps import ReplicaSteps
from stratagem.planning.memory import CompilerMemory

__all__ = ["describe"]

_NUM_STEPS = 4


def describe(options: WorkerOptions) -> dict[str, Any]:
    workload = workload_of(options)
    strategy = sg.OneDeviceStrategy(options.device_names[0])
    with strategy.scope():
        model = build_model(options.workload)
        compile_model(model, steps_per_call=1)
    inputs, labels = workload.batch()
    model.fit(
        np.concatenate([inputs] * _NUM_STEPS),
        np.concatenate([labels] * _NUM_STEPS),
        batch_size=workload.batch_size,
        **fit_arguments(),
    )
    variables = strategy.variables.live()
    state_bytes = sum(jax.block_until_ready(variable.storage).nbytes for variable in variables)
    device = strategy.topology.devices[0]
    stats = device.memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        whole_bytes, how = stats["peak_bytes_in_use"], "peak of the device"
    else:
        batch = take_batch((inputs, labels), 1)
        arguments = batch_arguments(place([batch], strategy.topology))
        lowered = strategy.executor.lower(ReplicaSteps(model).train, arguments, strategy.topology)
        memory = CompilerMemory.of(lowered.compile().memory_analysis(), lasting_bytes=state_bytes)
        next_batch_bytes = sum(array.nbytes for array in arguments.split)
        whole_bytes = memory.peak_bytes - memory.code_bytes + next_batch_bytes
        how = "program that ran"
    return {"measured_state_bytes": state_bytes, "measured_bytes": int(whole_bytes), "how": how}


if __name__ == "__main__":
    answer_once(describe)
