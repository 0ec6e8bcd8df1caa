"""Peer: `strategy.run` in a loop in a `tf.function`, as TensorFlow's guide of custom loops says."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from benchmarks.workers.keras_models import build_model
from benchmarks.workers.protocol import Training, WorkerOptions, serve
from benchmarks.workers.tensorflow_fit import make_dataset, make_strategy
from benchmarks.workloads import workload_of

__all__ = ["prepare"]


def prepare(options: WorkerOptions) -> Training:
    workload = workload_of(options)
    strategy = make_strategy(options) or tf.distribute.get_strategy()
    with strategy.scope():
        model = build_model(options.workload)
        optimizer = keras.optimizers.Adam()
        optimizer.build(model.trainable_variables)
        mean_loss = keras.metrics.Mean()
        accuracy = keras.metrics.SparseCategoricalAccuracy()
    per_example_loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)
    dataset = strategy.experimental_distribute_dataset(make_dataset(workload))

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
            iterator = iter(dataset)
            for _ in range(workload.steps_per_epoch // options.steps_per_call):
                train_steps(iterator)
            loss = float(mean_loss.result())
            float(accuracy.result())
        return loss

    return Training(run_epochs, workload.steps_per_epoch)


if __name__ == "__main__":
    serve(prepare)
