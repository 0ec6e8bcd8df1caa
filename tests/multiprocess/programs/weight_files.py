"""Reads and writes files of weights in shards over two processes, and writes what it saw.

`python weight_files.py FOLDER`, with TF_CONFIG, and four devices a process. Each process writes
the peaks of its memory, in bytes above that before a call, to FOLDER/process-N.npz.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import jax
import keras
import numpy as np

import stratagem as sg

jax.config.update("jax_num_cpu_devices", 4)
folder = Path(sys.argv[1])
strategy = sg.MultiWorkerMirroredStrategy(shard_state="all")


def make_model(num_layers: int) -> Any:
    with strategy.scope():
        layers = [keras.layers.Dense(1024, use_bias=False) for _ in range(num_layers)]
        return keras.Sequential([keras.Input((1024,)), *layers])


def status_bytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(key)]
    return int(line.split()[1]) * 1024


def peak_bytes(call: Any) -> int:
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = status_bytes("VmRSS")
    call()
    return status_bytes("VmHWM") - before


def checksum(model: Any) -> float:
    """All processes gather."""
    return sum(float(np.asarray(one, np.float64).sum()) for one in model.weights)


keras.utils.set_random_seed(1 + jax.process_index())  # otherwise that of process 0
warm = make_model(2)
warm.save_weights(folder / "warm.weights.h5")
warm.load_weights(folder / "warm.weights.h5")
models: list[Any] = []
found: dict[str, Any] = {"build": peak_bytes(lambda: models.append(make_model(24)))}
model = models[0]
found["draws"] = [
    np.array_equal(np.asarray(layer.kernel), layer.kernel_initializer(layer.kernel.shape))
    for layer in model.layers
]
found["load"] = peak_bytes(lambda: model.load_weights(folder / "plain.weights.h5"))
found["save"] = peak_bytes(lambda: model.save_weights(folder / "back.weights.h5"))
own = [shard.data.nbytes for one in model.weights for shard in one.stored.addressable_shards]
found |= {"own": sum(own), "checksum": checksum(model)}
np.savez(folder / f"process-{jax.process_index()}.npz", **found)
