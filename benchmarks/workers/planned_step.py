"""Plans a training step of `fit` for one GPU and many that are not here: what a device holds.

The batch size is that of one device. Nothing is trained, and no variable takes memory.
"""

from __future__ import annotations

from typing import Any

from benchmarks.plan.run import ONE_DEVICE, TARGET
from benchmarks.workers.protocol import WorkerOptions, answer_once
from benchmarks.workloads import workload_of

import stratagem as sg  # isort: skip - before keras, because it selects the JAX backend
import jax
import keras

from benchmarks.workers.keras_models import build_model, compile_model

__all__ = ["describe"]


def describe(options: WorkerOptions) -> dict[str, Any]:
    one, many = _plan(options, ONE_DEVICE), _plan(options, TARGET)
    memory = one.memory
    return {
        "compiler": one.compiler,
        "planned_state_bytes": memory.parameters_bytes
        + memory.optimizer_bytes
        + memory.other_state_bytes,
        "planned_bytes": memory.total_bytes - memory.code_bytes,
        "planned_of_many_bytes": many.memory.total_bytes - many.memory.code_bytes,
    }


def _plan(options: WorkerOptions, target: str) -> Any:
    workload = workload_of(options)
    num_examples = workload.batch_size * sg.planning.parse_target(target).num_devices
    shapes = (
        jax.ShapeDtypeStruct((num_examples, *workload.input_shape), workload.input_dtype),
        jax.ShapeDtypeStruct((num_examples,), "int32"),
    )

    def build() -> keras.Model:
        model = build_model(options.workload)
        compile_model(model, steps_per_call=1)
        return model

    return sg.plan(build, shapes, target)


if __name__ == "__main__":
    answer_once(describe)
