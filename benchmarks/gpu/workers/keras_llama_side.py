"""Peer: Keras's own `fit` of a Llama of KerasHub."""

from __future__ import annotations

import keras

from benchmarks.gpu.models import GpuModel
from benchmarks.gpu.options import SideOptions
from benchmarks.gpu.workers.fit_training import training_by_fit
from benchmarks.gpu.workers.jax_device import count_compile_s, find_device, peak_bytes
from benchmarks.gpu.workers.keras_llama import build_llama, keras_arrays, make_optimizer
from benchmarks.gpu.workers.measurement import Training, measure

__all__ = ["prepare"]


def prepare(options: SideOptions, model: GpuModel) -> Training:
    compile_s = count_compile_s()
    device = find_device(options.platform)
    network = build_llama(model, attention=options.attention)
    network.compile(
        make_optimizer(model, options.accumulation),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=None,
        steps_per_execution=options.steps_per_call,
    )
    return training_by_fit(
        network,
        keras_arrays(model),
        model,
        options,
        device_kind=device.device_kind,
        peak_bytes=lambda: peak_bytes(device),
        compile_s=compile_s,
    )


if __name__ == "__main__":
    measure(prepare)
