"""Ours: asynchronous saves of a state on the device while steps change it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import stratagem as sg  # isort: skip - before jax, because it chooses Keras's backend

import jax

from benchmarks.gpu.options import SideOptions
from benchmarks.gpu.workers.checkpoint_stall import NUM_ARRAYS, measure_saves
from benchmarks.gpu.workers.jax_device import find_device, peak_bytes
from benchmarks.gpu.workers.measurement import Figures

__all__: list[str] = []


def _main() -> None:
    options = SideOptions.from_command_line()
    figures = Figures(options.result)
    device = find_device(options.platform)
    size = options.state_bytes // 4 // NUM_ARRAYS
    strategy = sg.OneDeviceStrategy(f"{options.platform}:0")
    draw = jax.jit(lambda seed: jax.random.uniform(jax.random.key(seed), (size,)))
    with strategy.scope(), jax.default_device(device):
        variables = [sg.Variable(draw(index)) for index in range(NUM_ARRAYS)]
    checkpoint = sg.train.Checkpoint(**{f"v{i}": one for i, one in enumerate(variables)})
    checkpoint.prepare()
    checkpoint.sync()  # done long before the first save of a real training
    figures.add(stage="prepared", device_kind=device.device_kind)
    written: list[str] = []

    def replica_step() -> None:
        for one in variables:
            one.assign(one.value * 0.999 + 0.001)

    def step() -> None:
        strategy.run(replica_step)
        jax.block_until_ready([one.value for one in variables])

    def save(folder: str) -> Callable[[], bool]:
        settings: Any = sg.train.CheckpointOptions(
            enable_async=True, experimental_write_callbacks=[written.append]
        )
        checkpoint.write(folder, settings)
        return lambda: bool(written) and written[-1] == folder

    measure_saves(options, figures, step, save)
    checkpoint.sync()
    figures.add(stage="done", peak_bytes=peak_bytes(device))
    os._exit(0)


if __name__ == "__main__":
    _main()
