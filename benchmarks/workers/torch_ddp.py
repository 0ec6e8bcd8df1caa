"""Peer: PyTorch, with `DistributedDataParallel` over Gloo where there are several devices.

A device is a process. This one is rank 0; it starts the others and tells them what it is asked for.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from benchmarks.workers.protocol import Training, WorkerOptions, serve
from benchmarks.workers.torch_models import build_model
from benchmarks.workloads import workload_of

__all__ = ["prepare"]


def prepare(options: WorkerOptions) -> Training:
    num_ranks = options.num_devices
    cores = sorted(os.sched_getaffinity(0)) if options.pinned else []
    others = []
    if num_ranks > 1:
        port = _free_port()
        context = mp.get_context("spawn")
        for rank in range(1, num_ranks):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_follow, args=(theirs, options, rank, port, cores), daemon=True
            )
            process.start()
            theirs.close()
            others.append(ours)
    _pin(0, cores)
    if num_ranks > 1:
        _join(0, num_ranks, port)
    train = _make_training(options, rank=0)

    def run_epochs(num_epochs: int) -> float:
        for pipe in others:
            pipe.send(num_epochs)
        return train(num_epochs)

    return Training(run_epochs, workload_of(options).steps_per_epoch)


def _follow(pipe: Any, options: WorkerOptions, rank: int, port: int, cores: list[int]) -> None:
    """Trains as rank 0 says, until that one is gone."""
    _pin(rank, cores)
    _join(rank, options.num_devices, port)
    train = _make_training(options, rank)
    while True:
        try:
            num_epochs = pipe.recv()
        except EOFError:
            return
        train(num_epochs)


def _pin(rank: int, cores: list[int]) -> None:
    """Keeps a rank on a core of its own, before any of its threads that compute; [] keeps none."""
    if cores:
        os.sched_setaffinity(0, {cores[rank]})


def _join(rank: int, num_ranks: int, port: int) -> None:
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=num_ranks
    )


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _make_training(options: WorkerOptions, rank: int) -> Callable[[int], float]:
    model = build_model(options.workload)
    if options.num_devices > 1:
        model = nn.parallel.DistributedDataParallel(
            model, gradient_as_bucket_view=True, static_graph=True
        )
    if options.compiled:
        model = torch.compile(model)
    optimizer = torch.optim.Adam(model.parameters(), eps=1e-7, fused=True)
    batches = _batches(options, rank)
    num_examples = len(batches) * len(batches[0][1])

    def train(num_epochs: int) -> float:
        loss = float("nan")
        for _ in range(num_epochs):
            sums = torch.zeros(2)
            for x, y in batches:
                logits = model(x)
                mean_loss = nn.functional.cross_entropy(logits.flatten(0, -2), y.flatten())
                optimizer.zero_grad()
                mean_loss.backward()
                optimizer.step()
                with torch.no_grad():
                    sums[0] += mean_loss * len(y)
                    sums[1] += (logits.argmax(dim=-1) == y).sum()
            if options.num_devices > 1:
                dist.all_reduce(sums)
            loss = sums[0].item() / (num_examples * options.num_devices)
        return loss

    return train


def _batches(options: WorkerOptions, rank: int) -> list[tuple[Any, Any]]:
    """This rank's part of each batch, as tensors in memory: no loader is faster than none."""
    workload = workload_of(options)
    x, y = workload.arrays()
    if x.ndim == 4:
        x = np.ascontiguousarray(np.moveaxis(x, -1, 1))
    batches = []
    for x_batch, y_batch in zip(
        np.split(x, workload.steps_per_epoch), np.split(y, workload.steps_per_epoch), strict=True
    ):
        x_part = torch.from_numpy(np.array_split(x_batch, options.num_devices)[rank])
        y_part = torch.from_numpy(np.array_split(y_batch, options.num_devices)[rank])
        if x_part.ndim == 4:
            x_part = x_part.to(memory_format=torch.channels_last)
        batches.append((x_part, y_part.long()))
    return batches


if __name__ == "__main__":
    serve(prepare)
