"""Peer: Keras's own `fit` on JAX, on one device, or on several under its `DataParallel`."""

from __future__ import annotations

import os

import jax
import keras

from benchmarks.workers.keras_models import build_model, compile_model, fit_arguments
from benchmarks.workers.protocol import Training, WorkerOptions, serve
from benchmarks.workloads import workload_of

__all__ = ["prepare"]


def prepare(options: WorkerOptions) -> Training:
    if options.platform == "cpu":
        # The size of XLA:CPU's thread pool must be in the environment already (see cases.py).
        assert options.num_devices == 1 or "NPROC" in os.environ
        jax.config.update("jax_num_cpu_devices", options.num_devices)
    if options.num_devices > 1:
        distribution = keras.distribution.DataParallel(devices=options.device_names)
        keras.distribution.set_distribution(distribution)
    workload = workload_of(options)
    model = build_model(options.workload)
    compile_model(model, steps_per_call=options.steps_per_call)
    x, y = workload.arrays()

    def run_epochs(num_epochs: int) -> float:
        history = model.fit(
            x, y, batch_size=workload.batch_size, epochs=num_epochs, **fit_arguments()
        )
        return history.history["loss"][-1]

    kind = jax.devices(options.platform)[0].device_kind
    return Training(run_epochs, workload.steps_per_epoch, kind)


if __name__ == "__main__":
    serve(prepare)
