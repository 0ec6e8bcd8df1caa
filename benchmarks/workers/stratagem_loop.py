"""Ours: a loop of one's own over a distributed dataset, with `run` or with `run_steps`."""

from __future__ import annotations

from typing import Any

from benchmarks.workers.protocol import Training, WorkerOptions, serve
from benchmarks.workloads import workload_of

import stratagem as sg  # isort: skip - before keras, because it selects the JAX backend
import keras

from benchmarks.workers.keras_models import build_model
from benchmarks.workers.stratagem_fit import make_strategy


def prepare(options: WorkerOptions) -> Training:
    workload = workload_of(options)
    strategy = make_strategy(options)
    with strategy.scope():
        model = build_model(workload)
        optimizer = keras.optimizers.Adam()
        mean_loss = keras.metrics.Mean()
        accuracy = keras.metrics.SparseCategoricalAccuracy()
    per_example_loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)
    dataset = strategy.distribute_dataset(
        sg.input.Dataset(workload.arrays(), batch_size=workload.batch_size)
    )

    def train_step(batch: Any) -> None:
        x, y = batch

        def loss_fn() -> Any:
            logits = model(x, training=True)
            losses = per_example_loss(y, logits)
            return sg.compute_average_loss(losses), (losses, logits)

        (_, (losses, logits)), gradients = sg.value_and_grad(
            loss_fn, model.trainable_variables, has_aux=True
        )
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        mean_loss.update_state(losses)
        accuracy.update_state(y, logits)

    def run_epochs(num_epochs: int) -> float:
        for _ in range(num_epochs):
            mean_loss.reset_state()
            accuracy.reset_state()
            if options.steps_per_call == 1:
                for batch in dataset:
                    strategy.run(train_step, args=(batch,))
            else:
                iterator = iter(dataset)
                for _ in range(workload.steps_per_epoch // options.steps_per_call):
                    strategy.run_steps(train_step, iterator, options.steps_per_call)
            loss = float(mean_loss.result())
            float(accuracy.result())
        return loss

    return Training(run_epochs, workload.steps_per_epoch)


if __name__ == "__main__":
    serve(prepare)
