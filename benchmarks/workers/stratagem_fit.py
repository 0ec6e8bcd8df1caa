"""Ours: `fit` of a Keras model under a strategy.

With a folder as its first argument, it takes one step as a worker of `stratagem launch`, or alone,
and writes the end of that step on the machine's monotonic clock into the folder.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from pathlib import Path

from benchmarks.workers.protocol import Training, WorkerOptions, serve
from benchmarks.workloads import Workload, workload_of

import stratagem as sg  # isort: skip - before keras, because it selects the JAX backend
import jax

from benchmarks.workers.jax_device import details_of, profile_of
from benchmarks.workers.keras_models import build_model, compile_model, fit_arguments, fit_arrays


def make_strategy(options: WorkerOptions) -> sg.Strategy:
    if options.pinned:  # a worker, of a cluster or alone
        return sg.MultiWorkerMirroredStrategy()
    if options.num_devices > 1:
        return sg.MirroredStrategy(options.device_names)
    (name,) = options.device_names
    if options.optimizer_memory != "device":
        memory = {sg.placement.optimizer_state: options.optimizer_memory}
        return sg.HybridStrategy([name], placement=memory)
    return sg.OneDeviceStrategy(name)


def prepare(options: WorkerOptions, workload: Workload | None = None) -> Training:
    return _prepare_under(make_strategy(options), options, workload or workload_of(options))


def _prepare_under(strategy: sg.Strategy, options: WorkerOptions, workload: Workload) -> Training:
    details = details_of(options.platform)
    with strategy.scope():
        model = build_model(workload, attention=options.attention)
        loss = None
        if options.has_chunks:
            model = model.backbone
            loss = sg.nn.ChunkedSparseCategoricalCrossentropy(model.token_embedding)
        if options.remat:
            sg.remat(model, options.remat)
        steps, accumulation = options.steps_per_call, options.accumulation
        compile_model(model, workload, steps_per_call=steps, accumulation=accumulation, loss=loss)
    x, y = fit_arrays(workload)
    if options.data_on_device:
        x, y = jax.device_put((x, y), jax.devices(options.platform)[0])

    def run_epochs(num_epochs: int) -> float:
        size = workload.batch_size
        history = model.fit(x, y, batch_size=size, epochs=num_epochs, **fit_arguments())
        return history.history["loss"][-1]

    num_trained = sum(one.value.size for one in model.trainable_variables)
    return Training(
        run_epochs,
        workload.steps_per_epoch,
        details=lambda: {**details(), "num_parameters": num_trained},
        profile=functools.partial(profile_of, run_epochs),
    )


def _take_first_step(folder: Path, options: WorkerOptions) -> None:
    strategy = sg.MultiWorkerMirroredStrategy()
    _prepare_under(strategy, options, workload_of(options)).run_epochs(1)
    (folder / str(os.getpid())).write_text(str(time.monotonic()), encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) > 2:
        _take_first_step(Path(sys.argv[1]), WorkerOptions(**json.loads(sys.argv[2])))
    else:
        serve(prepare)
