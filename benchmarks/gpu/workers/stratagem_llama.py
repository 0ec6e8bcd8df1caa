"""Ours: `fit` of a Llama of KerasHub under a strategy."""

from __future__ import annotations

import stratagem as sg  # isort: skip - before keras, because it selects the JAX backend

from typing import Any

import keras

from benchmarks.gpu.models import GpuModel
from benchmarks.gpu.options import SideOptions
from benchmarks.gpu.workers.fit_training import training_by_fit
from benchmarks.gpu.workers.jax_device import count_compile_s, find_device, peak_bytes
from benchmarks.gpu.workers.keras_llama import build_llama, keras_arrays, make_optimizer
from benchmarks.gpu.workers.measurement import Training, measure
from benchmarks.gpu.workers.stratagem_side import with_profile

__all__ = ["prepare"]


def prepare(options: SideOptions, model: GpuModel) -> Training:
    compile_s = count_compile_s()
    device = find_device(options.platform)
    with _strategy(options).scope():
        network = build_llama(model, attention=options.attention)
        loss: Any = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        if options.loss == "chunks":
            network = network.backbone
            loss = sg.nn.ChunkedSparseCategoricalCrossentropy(network.token_embedding)
        if options.remat:
            sg.remat(network, options.remat)
        network.compile(
            make_optimizer(model, options.accumulation),
            loss,
            weighted_metrics=None,
            steps_per_execution=options.steps_per_call,
        )
    training = training_by_fit(
        network,
        keras_arrays(model),
        model,
        options,
        device_kind=device.device_kind,
        peak_bytes=lambda: peak_bytes(device),
        compile_s=compile_s,
    )
    return with_profile(training, options)


def _strategy(options: SideOptions) -> sg.Strategy:
    name = f"{options.platform}:0"
    if options.optimizer_memory == "device":
        return sg.OneDeviceStrategy(name)
    placement = {sg.placement.optimizer_state: options.optimizer_memory}
    return sg.HybridStrategy([name], placement=placement)


if __name__ == "__main__":
    measure(prepare)
