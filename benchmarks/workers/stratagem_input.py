"""Ours: a loop over a distributed dataset; or its first batch again and again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.workers.protocol import Training, WorkerOptions, serve
from benchmarks.workloads import workload_of

import stratagem as sg  # isort: skip - before keras, because it selects the JAX backend

from benchmarks.workers.jax_grain import batches, stand_in
from benchmarks.workers.stratagem_fit import make_strategy


def prepare(options: WorkerOptions) -> Training:
    workload = workload_of(options)
    strategy = make_strategy(options)
    dataset = strategy.distribute_dataset(batches(options))
    taken = _again_and_again(dataset) if options.data_on_device else iter(dataset)

    def step(batch: Any) -> Any:
        images, _ = batch
        return sg.get_replica_context().all_reduce("MEAN", stand_in(images, options.step_s))

    def run_epochs(num_epochs: int) -> float:
        for _ in range(num_epochs * workload.steps_per_epoch):
            losses = strategy.run(step, args=(next(taken),))
        return float(strategy.reduce("SUM", losses, axis=None))

    return Training(run_epochs, workload.steps_per_epoch)


def _again_and_again(dataset: Any) -> Iterator[Any]:
    batch = next(iter(dataset))
    while True:
        yield batch


if __name__ == "__main__":
    serve(prepare)
