"""Peer: torch.distributed.checkpoint.async_save of tensors on the device that steps change."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from benchmarks.gpu.options import SideOptions
from benchmarks.gpu.workers.checkpoint_stall import NUM_ARRAYS, measure_saves
from benchmarks.gpu.workers.measurement import Figures
from benchmarks.gpu.workers.torch_device import device_kind, peak_bytes, prepare_torch

__all__: list[str] = []


def _main() -> None:
    options = SideOptions.from_command_line()
    figures = Figures(options.result)
    device = prepare_torch()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=0, world_size=1)
    size = options.state_bytes // 4 // NUM_ARRAYS
    state = {f"v{index}": torch.rand(size, device=device) for index in range(NUM_ARRAYS)}
    figures.add(stage="prepared", device_kind=device_kind(device))

    def step() -> None:
        for value in state.values():
            value.mul_(0.999).add_(0.001)
        if device.type == "cuda":
            torch.cuda.synchronize()

    def save(folder: str) -> Callable[[], bool]:
        writing: Any = dcp.async_save(state, checkpoint_id=folder)
        return lambda: writing.done() and writing.result() is not None

    measure_saves(options, figures, step, save)
    figures.add(stage="done", peak_bytes=peak_bytes())
    os._exit(0)


if __name__ == "__main__":
    _main()
