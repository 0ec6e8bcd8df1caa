"""Ours: a loop over a distributed dataset; or its first batch again and again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.workers.protocol import Training, WorkerOptions, serve
from benchmarks.workloads import workload_of

import stratagem as sg  # isort: skip - before keras, because it selects the JAX backend
import jax
import keras

from benchmarks.workers.grain_images import batches, stand_in
from benchmarks.workers.keras_models import build_model
from benchmarks.workers.stratagem_fit import make_strategy

__all__ = ["prepare"]


def prepare(options: WorkerOptions) -> Training:
    workload = workload_of(options)
    strategy = make_strategy(options)
    source = (
        sg.input.Dataset(workload.arrays(), batch_size=workload.batch_size)
        if options.step_s is None
        else batches(options)
    )
    dataset = strategy.distribute_dataset(source)
    step = _training_step(options, strategy) if options.step_s is None else _stand_in_step(options)
    taken = _again_and_again(dataset) if options.data_on_device else _without_end(dataset)

    def run_epochs(num_epochs: int) -> float:
        for _ in range(num_epochs * workload.steps_per_epoch):
            losses = strategy.run(step, args=(next(taken),))
        return float(strategy.reduce("SUM", losses, axis=None))

    kind = jax.devices(options.platform)[0].device_kind
    return Training(run_epochs, workload.steps_per_epoch, kind)


def _without_end(dataset: Any) -> Iterator[Any]:
    while True:
        yield from dataset


def _again_and_again(dataset: Any) -> Iterator[Any]:
    batch = next(iter(dataset))
    while True:
        yield batch


def _stand_in_step(options: WorkerOptions) -> Callable[[Any], Any]:
    step_s = options.step_s
    assert step_s is not None

    def step(batch: Any) -> Any:
        images, _ = batch
        return sg.get_replica_context().all_reduce("MEAN", stand_in(images, step_s))

    return step


def _training_step(options: WorkerOptions, strategy: sg.Strategy) -> Callable[[Any], Any]:
    with strategy.scope():
        model = build_model(options.workload)
        optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
    per_example_loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)

    def step(batch: Any) -> Any:
        images, labels = batch

        def loss_fn() -> Any:
            return sg.compute_average_loss(per_example_loss(labels, model(images, training=True)))

        loss, gradients = sg.value_and_grad(loss_fn, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    return step


if __name__ == "__main__":
    serve(prepare)
