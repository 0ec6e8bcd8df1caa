"""Peer: Keras's own `fit`, on the backend that `KERAS_BACKEND` names."""

from __future__ import annotations

import keras

from benchmarks.gpu.models import GpuModel
from benchmarks.gpu.options import SideOptions
from benchmarks.gpu.workers.fit_training import training_by_fit
from benchmarks.gpu.workers.keras_networks import build_model, compile_model
from benchmarks.gpu.workers.measurement import Training, measure

__all__ = ["prepare"]


def prepare(options: SideOptions, model: GpuModel) -> Training:
    figures = _on_torch() if keras.backend.backend() == "torch" else _on_jax(options)
    network = build_model(model)
    compile_model(network, model, steps_per_call=options.steps_per_call)
    return training_by_fit(network, model.arrays(), model, options, **figures)


def _on_jax(options: SideOptions) -> dict[str, object]:
    from benchmarks.gpu.workers.jax_device import count_compile_s, find_device, peak_bytes

    device = find_device(options.platform)
    return {
        "device_kind": device.device_kind,
        "peak_bytes": lambda: peak_bytes(device),
        "compile_s": count_compile_s(),
    }


def _on_torch() -> dict[str, object]:
    from benchmarks.gpu.workers.torch_device import device_kind, peak_bytes, prepare_torch

    return {"device_kind": device_kind(prepare_torch()), "peak_bytes": peak_bytes}


if __name__ == "__main__":
    measure(prepare)
