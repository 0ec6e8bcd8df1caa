"""Ours: `strategy.run` of a step written with Keras objects."""

from __future__ import annotations

from typing import Any

from benchmarks.workers.protocol import Training, WorkerOptions, serve
from benchmarks.workloads import workload_of

import stratagem as sg  # isort: skip - before keras, because it selects the JAX backend
import jax
import keras
import numpy as np

from benchmarks.workers.keras_models import build_model
from benchmarks.workers.stratagem_fit import make_strategy


def prepare(options: WorkerOptions) -> Training:
    workload = workload_of(options)
    strategy = make_strategy(options)
    with strategy.scope():
        model = build_model(workload)
        optimizer = keras.optimizers.Adam()
    per_example_loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)

    def train_step(x: Any, y: Any) -> Any:
        def loss_fn() -> Any:
            losses = per_example_loss(y, model(x, training=True))
            return sg.compute_average_loss(losses, global_batch_size=workload.batch_size)

        loss, gradients = sg.value_and_grad(loss_fn, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    parts = [np.split(array, options.num_devices) for array in workload.batch()]
    batch = strategy.distribute_values_from_function(
        lambda context: tuple(
            jax.numpy.asarray(part[context.replica_id_in_sync_group]) for part in parts
        )
    )

    def run_epochs(num_epochs: int) -> float:
        for _ in range(num_epochs * workload.steps_per_epoch):
            losses = strategy.run(train_step, args=batch)
        return float(strategy.reduce("SUM", losses, axis=None))

    return Training(run_epochs, workload.steps_per_epoch)


if __name__ == "__main__":
    serve(prepare)
