"""Compiles the step of a published model for one host, and tells its compute and its messages.

The workload is the name of a program and of an accelerator; the batch is that of one device.
Nothing is trained, and no variable takes memory.
"""

from __future__ import annotations

from typing import Any

from benchmarks.workers.protocol import WorkerOptions, answer_once

import stratagem as sg  # isort: skip - before keras, because it selects the JAX backend

from benchmarks.workers.published_models import PUBLISHED_MODELS

__all__ = ["describe"]

_NUM_DEVICES = 8


def describe(options: WorkerOptions) -> dict[str, Any]:
    program, accelerator = options.workload.split()
    model = PUBLISHED_MODELS[program]
    assert options.batch_size is not None
    shapes = model.shapes(_NUM_DEVICES * options.batch_size)
    target = f"{_NUM_DEVICES}x{accelerator}"
    plan = sg.plan(model.build, shapes, target, shard_state=model.shard_state)
    groups = {len(one.groups[0]) for one in plan.reductions if one.groups}
    assert groups <= {_NUM_DEVICES}, f"messages in groups of {groups}, not among all devices"
    return {
        "batch": options.batch_size,
        "compiler": plan.compiler,
        "num_parameters": plan.num_parameters,
        "compute_s": plan.step.compute_s,
        "launch_s": plan.step.launch_s,
        "reductions": [
            {"name": one.name, "num_bytes": one.num_bytes, "kind": one.kind, "times": one.times}
            for one in plan.reductions
        ],
    }


if __name__ == "__main__":
    answer_once(describe)
