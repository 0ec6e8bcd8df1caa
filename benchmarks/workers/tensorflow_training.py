"""Peer: training by TensorFlow, under `MirroredStrategy` where there are several devices.

`fit` is that of Keras, with input as TensorFlow's guides say. `loop` is `strategy.run` in a loop in
a `tf.function`, as the guide of custom loops says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from benchmarks.workers.keras_models import build_model, compile_model
from benchmarks.workers.protocol import Training, WorkerOptions, serve
from benchmarks.workloads import Workload, workload_of


def prepare(options: WorkerOptions) -> Training:
    workload = workload_of(options)
    strategy = tf.distribute.get_strategy()
    if options.num_devices > 1:
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration()] * options.num_devices
        )
        strategy = tf.distribute.MirroredStrategy(options.device_names)
    # The batches of an epoch are kept after they were made once, and fetched ahead.
    dataset = tf.data.Dataset.from_tensor_slices(workload.arrays())
    dataset = dataset.batch(workload.batch_size, drop_remainder=True).cache()
    make = _loop if options.kind == "loop" else _fit
    run_epochs = make(strategy, workload, dataset.prefetch(tf.data.AUTOTUNE), options)
    return Training(run_epochs, workload.steps_per_epoch)


def _fit(
    strategy: Any, workload: Workload, dataset: Any, options: WorkerOptions
) -> Callable[[int], float]:
    with strategy.scope():
        model = build_model(workload)
        # Without XLA it is faster on a CPU, and XLA fails under MirroredStrategy: "Trying to access
        # resource located in device CPU:1 from device CPU:0".
        steps = options.steps_per_call
        compile_model(model, workload, steps_per_call=steps, jit_compile=False)
    return lambda num_epochs: model.fit(dataset, epochs=num_epochs, verbose=0).history["loss"][-1]


def _loop(
    strategy: Any, workload: Workload, dataset: Any, options: WorkerOptions
) -> Callable[[int], float]:
    with strategy.scope():
        model = build_model(workload)
        optimizer = keras.optimizers.Adam()
        optimizer.build(model.trainable_variables)
        mean_loss = keras.metrics.Mean()
        accuracy = keras.metrics.SparseCategoricalAccuracy()
    per_example_loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)
    distributed = strategy.experimental_distribute_dataset(dataset)

    def train_step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            losses = per_example_loss(y, logits)
            loss = tf.nn.compute_average_loss(losses, global_batch_size=workload.batch_size)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        mean_loss.update_state(losses)
        accuracy.update_state(y, logits)

    @tf.function
    def train_steps(iterator: Any) -> None:
        for _ in tf.range(options.steps_per_call):
            strategy.run(train_step, args=next(iterator))

    def run_epochs(num_epochs: int) -> float:
        for _ in range(num_epochs):
            mean_loss.reset_state()
            accuracy.reset_state()
            iterator = iter(distributed)
            for _ in range(workload.steps_per_epoch // options.steps_per_call):
                train_steps(iterator)
            loss = float(mean_loss.result())
            float(accuracy.result())
        return loss

    return run_epochs


if __name__ == "__main__":
    serve(prepare)
