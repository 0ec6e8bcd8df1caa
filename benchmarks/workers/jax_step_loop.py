"""Reference for `strategy.run`: the same step by hand, called once a step on resident data."""

from __future__ import annotations

from typing import Any

from jax.sharding import PartitionSpec

from benchmarks.workers.jax_training_step import AXIS, State, TrainingStep, make_devices
from benchmarks.workers.protocol import Training, WorkerOptions, serve
from benchmarks.workloads import workload_of

__all__ = ["prepare"]


def prepare(options: WorkerOptions) -> Training:
    workload = workload_of(options)
    devices = make_devices(options)
    step = TrainingStep(options.workload, devices)

    def train_step(state: State, x: Any, y: Any) -> tuple[State, Any]:
        state, loss_sum, _ = step(state, x, y)
        return state, loss_sum[None] / workload.batch_size

    copied, split = PartitionSpec(), PartitionSpec(AXIS)
    program = devices.compile(train_step, (copied, split, split), (copied, split))
    x, y = (devices.place(array, AXIS) for array in workload.batch())
    state = step.first_state

    def run_epochs(num_epochs: int) -> float:
        nonlocal state
        for _ in range(num_epochs * workload.steps_per_epoch):
            state, losses = program(state, x, y)
        return float(losses.sum())

    return Training(run_epochs, workload.steps_per_epoch, devices.kind)


if __name__ == "__main__":
    serve(prepare)
