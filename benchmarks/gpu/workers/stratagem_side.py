"""Ours: `fit` of a Keras model under a strategy."""

from __future__ import annotations

import stratagem as sg  # isort: skip - before keras, because it selects the JAX backend

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax

from benchmarks.gpu.models import GpuModel
from benchmarks.gpu.options import SideOptions
from benchmarks.gpu.workers.fit_training import training_by_fit
from benchmarks.gpu.workers.jax_device import count_compile_s, find_device, peak_bytes
from benchmarks.gpu.workers.keras_networks import TABLE, build_model, compile_model
from benchmarks.gpu.workers.measurement import Training, measure
from benchmarks.gpu_profile.worker import write_profile

__all__ = ["prepare", "with_profile"]


def prepare(options: SideOptions, model: GpuModel) -> Training:
    compile_s = count_compile_s()
    device = find_device(options.platform)
    with _strategy(options).scope():
        network = build_model(model)
        compile_model(network, model, steps_per_call=options.steps_per_call)
    arrays = model.arrays()
    if options.data == "device":
        arrays = jax.device_put(arrays, device)
    training = training_by_fit(
        network,
        arrays,
        model,
        options,
        device_kind=device.device_kind,
        peak_bytes=lambda: peak_bytes(device),
        compile_s=compile_s,
    )
    return with_profile(training, options)


def with_profile(training: Training, options: SideOptions) -> Training:
    """Returns a training that can be profiled."""
    profile = functools.partial(_profile, training, options.steps_per_call)
    return dataclasses.replace(training, profile=profile)


def _profile(training: Training, steps_per_call: int, path: Path) -> None:
    """Profiles two calls in the middle of an epoch."""
    steps = (steps_per_call, 3 * steps_per_call)
    folder = path.with_suffix("")
    with sg.profile(steps=steps, folder=folder, verbose=False) as profile:
        training.train(1)
    assert profile.trace is not None
    assert profile.summary is not None
    facts: dict[str, Any] = {"device": training.device_kind}
    write_profile(facts, Path(profile.trace), profile.summary, path)
    path.write_text(json.dumps(facts, indent=1))


def _strategy(options: SideOptions) -> sg.Strategy:
    name = f"{options.platform}:0"
    if options.table == "device":
        return sg.OneDeviceStrategy(name)
    return sg.HybridStrategy([name], placement={TABLE: options.table})


if __name__ == "__main__":
    measure(prepare)
