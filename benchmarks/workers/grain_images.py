"""The encoded images as a Grain pipeline with one worker process, and the step that they feed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from benchmarks.encoded_images import labelled_image
from benchmarks.workers.protocol import WorkerOptions
from benchmarks.workloads import workload_of

__all__ = ["batches", "begin", "stand_in"]


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


def begin(options: WorkerOptions) -> Iterator[Any]:
    """Returns an iterator over the batches, by hand."""
    flags.FLAGS.mark_as_parsed()  # Grain's workers ask absl, which a plain script has not called
    return iter(batches(options))


def stand_in(images: jax.Array, step_s: float) -> jax.Array:
    """Stands in for a training step: uses the images, then keeps its device busy for so long."""

    def wait(total: Any) -> Any:
        time.sleep(step_s)
        return np.asarray(total)

    total = jnp.mean(images[:, ::32, ::32], dtype=jnp.float32)
    return jax.pure_callback(wait, jax.ShapeDtypeStruct((), total.dtype), total)
