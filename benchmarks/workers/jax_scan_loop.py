"""Reference for `fit`: a loop over epochs by hand, many steps a call, with the same metrics.

Batches come one by one, as from any loader; those of a call are stacked and moved in one transfer.
The devices compute one call while the next is prepared, because nothing here waits for them before
the epoch's metrics are read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from benchmarks.workers.jax_training_step import AXIS, Devices, State, TrainingStep, make_devices
from benchmarks.workers.protocol import Training, WorkerOptions, serve
from benchmarks.workloads import Array, workload_of

__all__ = ["prepare"]

Batch = tuple[Any, Any]


def prepare(options: WorkerOptions) -> Training:
    workload = workload_of(options)
    devices = make_devices(options)
    step = TrainingStep(options.workload, devices)
    program = _compile(step, devices, options.steps_per_call)
    arrays = workload.arrays()
    resident = None
    if options.data_on_device:
        resident = list(_calls(arrays, workload.batch_size, options.steps_per_call, devices))
    state = step.first_state

    def run_epochs(num_epochs: int) -> float:
        nonlocal state
        loss = np.nan
        for _ in range(num_epochs):
            sums = devices.place(np.zeros((devices.count, 2), np.float32), AXIS)
            calls = resident or _calls(arrays, workload.batch_size, options.steps_per_call, devices)
            for x, y in calls:
                state, sums = program((state, sums), x, y)
            loss, _accuracy = np.asarray(sums).sum(axis=0) / len(arrays[1])
        return float(loss)

    return Training(run_epochs, workload.steps_per_epoch, devices.kind)


def _compile(step: TrainingStep, devices: Devices, steps_per_call: int) -> Any:
    """Many steps, with the sums of losses and right answers of each replica kept beside."""

    def one(carry: tuple[State, Any], batch: Batch) -> tuple[tuple[State, Any], None]:
        state, sums = carry
        state, loss_sum, num_right = step(state, *batch)
        return (state, sums + jax.numpy.stack([loss_sum, num_right])), None

    def many(carry: tuple[State, Any], x: Any, y: Any) -> tuple[State, Any]:
        if steps_per_call == 1:
            return one(carry, (x, y))[0]
        return jax.lax.scan(one, carry, (x, y), unroll=step.unroll)[0]

    batches = PartitionSpec(AXIS) if steps_per_call == 1 else PartitionSpec(None, AXIS)
    carry = (PartitionSpec(), PartitionSpec(AXIS))
    return devices.compile(many, (carry, batches, batches), carry)


def _calls(
    arrays: tuple[Array, Array], batch_size: int, steps_per_call: int, devices: Devices
) -> Iterator[Batch]:
    """Puts the data of one call after the other on its way to the devices."""
    batches = _batches(arrays, batch_size)
    for first in batches:
        if steps_per_call == 1:
            yield tuple(devices.place(array, AXIS) for array in first)
            continue
        group = [first, *(next(batches) for _ in range(steps_per_call - 1))]
        stacked = (np.stack(parts) for parts in zip(*group, strict=True))
        yield tuple(devices.place(array, None, AXIS) for array in stacked)


def _batches(arrays: tuple[Array, Array], batch_size: int) -> Iterator[tuple[Array, Array]]:
    x, y = arrays
    for start in range(0, len(x), batch_size):
        yield x[start : start + batch_size], y[start : start + batch_size]


if __name__ == "__main__":
    serve(prepare)
