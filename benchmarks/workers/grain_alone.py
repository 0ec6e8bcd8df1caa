"""Reference for loops fed from the host: the input alone, nobody trains."""

from __future__ import annotations

import jax

from benchmarks.workers.protocol import Training, WorkerOptions, serve
from benchmarks.workloads import workload_of

from benchmarks.workers.grain_images import begin  # isort: skip

__all__ = ["prepare"]


def prepare(options: WorkerOptions) -> Training:
    workload = workload_of(options)
    iterator = begin(options)

    def run_epochs(num_epochs: int) -> float:
        for _ in range(num_epochs * workload.steps_per_epoch):
            images, _ = next(iterator)
        return float(images[0, 0, 0, 0])

    kind = jax.devices(options.platform)[0].device_kind
    return Training(run_epochs, workload.steps_per_epoch, kind)


if __name__ == "__main__":
    serve(prepare)
