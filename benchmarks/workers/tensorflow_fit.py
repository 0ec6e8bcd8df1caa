"""Peer: `fit` of Keras on TensorFlow, under `MirroredStrategy` where there are several devices.

Its input is as TensorFlow's guides say.
"""

from __future__ import annotations

import contextlib

import tensorflow as tf

from benchmarks.workers.keras_models import build_model, compile_model
from benchmarks.workers.protocol import Training, WorkerOptions, serve
from benchmarks.workloads import Workload, workload_of

__all__ = ["make_dataset", "make_strategy", "prepare"]


def make_strategy(options: WorkerOptions) -> tf.distribute.Strategy | None:
    """Returns a strategy over as many logical CPU devices; None for one."""
    if options.num_devices == 1:
        return None
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * options.num_devices
    )
    return tf.distribute.MirroredStrategy(options.device_names)


def make_dataset(workload: Workload) -> tf.data.Dataset:
    """Returns the batches of an epoch, kept after they were made once and fetched ahead."""
    return (
        tf.data.Dataset.from_tensor_slices(workload.arrays())
        .batch(workload.batch_size, drop_remainder=True)
        .cache()
        .prefetch(tf.data.AUTOTUNE)
    )


def prepare(options: WorkerOptions) -> Training:
    workload = workload_of(options)
    strategy = make_strategy(options)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = build_model(options.workload)
        # Without XLA it is faster on a CPU, and XLA fails under MirroredStrategy: "Trying to access
        # resource located in device CPU:1 from device CPU:0".
        compile_model(model, steps_per_call=options.steps_per_call, jit_compile=False)
    dataset = make_dataset(workload)

    def run_epochs(num_epochs: int) -> float:
        return model.fit(dataset, epochs=num_epochs, verbose=0).history["loss"][-1]

    return Training(run_epochs, workload.steps_per_epoch)


if __name__ == "__main__":
    serve(prepare)
