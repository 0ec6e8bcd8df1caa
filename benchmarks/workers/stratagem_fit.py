"""Ours: `fit` of a Keras model under a strategy."""

from __future__ import annotations

from benchmarks.workers.protocol import Training, WorkerOptions, serve
from benchmarks.workloads import workload_of

import stratagem as sg  # isort: skip - before keras, because it selects the JAX backend
import jax

from benchmarks.workers.fit_callbacks import callback_arguments
from benchmarks.workers.keras_models import build_model, compile_model, fit_arguments

__all__ = ["make_strategy", "prepare", "prepare_under"]


def make_strategy(options: WorkerOptions) -> sg.Strategy:
    if options.num_devices > 1:
        return sg.MirroredStrategy(options.device_names)
    return sg.OneDeviceStrategy(options.device_names[0])


def prepare(options: WorkerOptions) -> Training:
    return prepare_under(make_strategy(options), options)


def prepare_under(strategy: sg.Strategy, options: WorkerOptions) -> Training:
    workload = workload_of(options)
    with strategy.scope():
        model = build_model(options.workload)
        compile_model(model, steps_per_call=options.steps_per_call)
    x, y = workload.arrays()
    if options.data_on_device:
        x, y = jax.device_put((x, y), jax.devices(options.platform)[0])

    def run_epochs(num_epochs: int) -> float:
        arguments = fit_arguments() | callback_arguments(options.callbacks)
        history = model.fit(x, y, batch_size=workload.batch_size, epochs=num_epochs, **arguments)
        return history.history["loss"][-1]

    kind = jax.devices(options.platform)[0].device_kind
    return Training(run_epochs, workload.steps_per_epoch, kind)


if __name__ == "__main__":
    serve(prepare)
