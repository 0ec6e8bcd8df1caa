"""Peer: PyTorch's DistributedDataParallel on the MLP, under `torchrun` that starts it again.

The options are those of `recovering_fit`. As PyTorch's elastic examples do, rank 0 saves with
`torch.save` and all load it when they start; here after each step, to a folder in memory.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.workers.protocol import StepTeller, arguments
from benchmarks.workers.torch_models import build_model
from benchmarks.workloads import WORKLOADS


def _main(options: dict[str, Any]) -> None:
    folder, state_path = Path(options["folder"]), Path(options["memory_dir"]) / "state.pt"
    torch.set_num_threads(1)
    _join()
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    x, y = (np.load(folder.parent / f"{name}.npy", mmap_mode="r") for name in "xy")
    model = nn.parallel.DistributedDataParallel(build_model(WORKLOADS["mlp"]))
    optimizer, loss_of = torch.optim.Adam(model.parameters()), nn.CrossEntropyLoss()
    step = 0
    if state_path.exists():
        state = torch.load(state_path)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    teller = StepTeller(folder, rank)
    own = options["batch_size"] // num_ranks
    steps_per_epoch = len(x) // options["batch_size"]
    while True:
        begin = (step % steps_per_epoch) * options["batch_size"] + rank * own
        inputs = torch.from_numpy(np.array(x[begin : begin + own]))
        labels = torch.from_numpy(np.array(y[begin : begin + own], np.int64))
        optimizer.zero_grad()
        loss_of(model(inputs), labels).backward()
        optimizer.step()
        step += 1
        if rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, state_path.with_suffix(".new"))
            os.replace(state_path.with_suffix(".new"), state_path)
        teller.tell(step)


def _join() -> None:
    """Joins under names of this start: PyTorch 2.13 finds the addresses of the one before."""
    variables = os.environ
    address, port = variables["MASTER_ADDR"], int(variables["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False)
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(f"start-{variables['TORCHELASTIC_RESTART_COUNT']}", store),
        rank=int(variables["RANK"]),
        world_size=int(variables["WORLD_SIZE"]),
    )


if __name__ == "__main__":
    _main(arguments())
