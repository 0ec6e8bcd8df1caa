"""The encoded images as a Grain pipeline, and what uses them by hand: nobody, or a loop.

`alone` takes the batches; `loop` is next, device_put, step, as one writes it by hand.
"""

from __future__ import annotations

import time
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from benchmarks.images import labelled_image
from benchmarks.workers.jax_by_hand import AXIS, make_devices
from benchmarks.workers.protocol import Training, WorkerOptions, serve
from benchmarks.workloads import workload_of


def batches(options: WorkerOptions) -> grain.IterDataset[Any]:
    """Batches of decoded images without end; a round of measurements begins with warm workers."""
    workload = workload_of(options)
    numbers = grain.MapDataset.range(workload.batch_size * workload.steps_per_epoch)
    examples = numbers.map(labelled_image).repeat()
    # One process with one thread: the other of two cores is for whoever trains.
    reading = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)
    dataset = examples.batch(workload.batch_size).to_iter_dataset(reading)
    return dataset.mp_prefetch(
        grain.MultiprocessingOptions(num_workers=1, per_worker_buffer_size=2)
    )


def stand_in(images: jax.Array, step_s: float) -> jax.Array:
    """Stands in for a training step: uses the images, then keeps its device busy for so long."""

    def wait(total: Any) -> Any:
        time.sleep(step_s)
        return np.asarray(total)

    total = jnp.mean(images[:, ::32, ::32], dtype=jnp.float32)
    return jax.pure_callback(wait, jax.ShapeDtypeStruct((), total.dtype), total)


def prepare(options: WorkerOptions) -> Training:
    flags.FLAGS.mark_as_parsed()  # Grain's workers ask absl, which a plain script has not called
    iterator = iter(batches(options))
    workload = workload_of(options)
    step = None if options.kind == "alone" else _step(options)

    def run_epochs(num_epochs: int) -> float:
        losses = []
        for _ in range(num_epochs * workload.steps_per_epoch):
            images, labels = next(iterator)
            losses = [step(images, labels)] if step else [images[0, 0, 0, 0]]
        return float(losses[0])

    return Training(run_epochs, workload.steps_per_epoch)


def _step(options: WorkerOptions) -> Any:
    devices = make_devices(options)
    split = jax.sharding.NamedSharding(devices.mesh, jax.sharding.PartitionSpec(AXIS))

    def replica_step(images: jax.Array) -> jax.Array:
        return jax.lax.pmean(stand_in(images, options.step_s), AXIS)

    mapped = jax.shard_map(
        replica_step,
        mesh=devices.mesh,
        in_specs=split.spec,
        out_specs=jax.sharding.PartitionSpec(),
        check_vma=False,
    )
    program = jax.jit(mapped)

    def step(images: Any, labels: Any) -> Any:
        placed, _ = jax.device_put((images, labels), split)
        return program(placed)

    return step


if __name__ == "__main__":
    serve(prepare)
