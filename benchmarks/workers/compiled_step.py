"""Compiles one training step of `fit` for two CPU devices, and tells what is in the program.

Nothing is trained. FLOPs and reduced bytes are those of the step's mathematics and so of any
device; the bytes that it accesses depend on what the compiler fuses.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from benchmarks.scaling.programs import reductions_in
from benchmarks.workers.protocol import WorkerOptions, answer_once
from benchmarks.workloads import workload_of

import stratagem as sg  # isort: skip - before keras, because it selects the JAX backend
import keras
import numpy as np

from benchmarks.workers.keras_models import build_model, compile_model
from stratagem.execution.tracing.arguments import batch_arguments
from stratagem.input.batches import take_batch
from stratagem.input.placement import place
from stratagem.keras.training.replica_steps import ReplicaSteps

__all__ = ["describe"]


def describe(options: WorkerOptions) -> dict[str, Any]:
    workload = workload_of(options)
    strategy = sg.MirroredStrategy(options.device_names)
    with strategy.scope():
        model = build_model(options.workload)
        compile_model(model, steps_per_call=1)
        model.optimizer.build(model.trainable_variables)
    batch = take_batch(workload.batch(), options.num_devices)
    arguments = batch_arguments(place([batch], strategy.topology))
    steps = ReplicaSteps(model)
    compiled = strategy.executor.lower(steps.train, arguments, strategy.topology).compile()
    costs = compiled.cost_analysis()
    return {
        "title": workload.title,
        "batch_size": workload.batch_size // options.num_devices,
        "num_parameters": sum(int(np.prod(v.shape)) for v in model.trainable_variables),
        "dtype": keras.config.dtype_policy().compute_dtype,
        "flops": costs["flops"],
        "accessed_bytes": costs["bytes accessed"],
        "reductions": [dataclasses.asdict(one) for one in reductions_in(compiled.as_text())],
    }


if __name__ == "__main__":
    answer_once(describe)
