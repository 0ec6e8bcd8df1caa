"""Peer: Keras's own `fit` on JAX, on one device, or on several under its `DataParallel`."""

from __future__ import annotations

import functools
import os

import jax
import keras

from benchmarks.workers.jax_device import details_of, profile_of
from benchmarks.workers.keras_models import build_model, compile_model, fit_arguments, fit_arrays
from benchmarks.workers.protocol import Training, WorkerOptions, serve
from benchmarks.workloads import Workload, workload_of


def prepare(options: WorkerOptions, workload: Workload | None = None) -> Training:
    workload = workload or workload_of(options)
    if options.platform == "cpu" and options.num_devices > 1:
        # The size of XLA:CPU's thread pool must be in the environment already (see sides.py).
        assert "NPROC" in os.environ
        jax.config.update("jax_num_cpu_devices", options.num_devices)
    if options.num_devices > 1:
        distribution = keras.distribution.DataParallel(devices=options.device_names)
        keras.distribution.set_distribution(distribution)
    details = details_of(options.platform)
    model = build_model(workload, attention=options.attention)
    steps, accumulation = options.steps_per_call, options.accumulation
    compile_model(model, workload, steps_per_call=steps, accumulation=accumulation)
    x, y = fit_arrays(workload)

    def run_epochs(num_epochs: int) -> float:
        history = model.fit(
            x, y, batch_size=workload.batch_size, epochs=num_epochs, **fit_arguments()
        )
        return history.history["loss"][-1]

    num_trained = sum(one.value.size for one in model.trainable_variables)
    return Training(
        run_epochs,
        workload.steps_per_epoch,
        details=lambda: {**details(), "num_parameters": num_trained},
        profile=functools.partial(profile_of, run_epochs),
    )


if __name__ == "__main__":
    serve(prepare)
