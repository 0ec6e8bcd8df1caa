"""Reference for loops fed from the host: next, device_put, step, as one writes it by hand."""

from __future__ import annotations

import jax

from benchmarks.workers.grain_images import begin, stand_in
from benchmarks.workers.protocol import Training, WorkerOptions, serve
from benchmarks.workloads import workload_of

__all__ = ["prepare"]


def prepare(options: WorkerOptions) -> Training:
    workload = workload_of(options)
    assert options.step_s is not None
    devices = jax.devices(options.platform)[: options.num_devices]
    mesh = jax.make_mesh((len(devices),), ("replica",), devices=devices)
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("replica"))
    step_s = options.step_s

    def replica_step(images: jax.Array) -> jax.Array:
        return jax.lax.pmean(stand_in(images, step_s), "replica")

    step = jax.jit(
        jax.shard_map(
            replica_step,
            mesh=mesh,
            in_specs=split.spec,
            out_specs=jax.sharding.PartitionSpec(),
            check_vma=False,
        )
    )
    iterator = begin(options)

    def run_epochs(num_epochs: int) -> float:
        for _ in range(num_epochs * workload.steps_per_epoch):
            images, labels = jax.device_put(next(iterator), split)
            loss = step(images)
        return float(loss) + 0.0 * float(labels[0])

    return Training(run_epochs, workload.steps_per_epoch, devices[0].device_kind)


if __name__ == "__main__":
    serve(prepare)
