"""Peer: PyTorch, with `DistributedDataParallel` over Gloo where there are several processes."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.workers.protocol import Training, WorkerOptions, serve
from benchmarks.workers.torch_models import build_model
from benchmarks.workloads import Workload, workload_of


def prepare(options: WorkerOptions) -> Training:
    workload = workload_of(options)
    num_ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if num_ranks > 1:
        dist.init_process_group("gloo")
    model = build_model(workload)
    if num_ranks > 1:
        model = nn.parallel.DistributedDataParallel(
            model, gradient_as_bucket_view=True, static_graph=True
        )
    optimizer = torch.optim.Adam(model.parameters(), eps=1e-7, fused=True)
    batches = _batches(workload, rank, num_ranks)
    num_examples = workload.steps_per_epoch * workload.batch_size

    def run_epochs(num_epochs: int) -> float:
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
            if num_ranks > 1:
                dist.all_reduce(sums)
            loss = sums[0].item() / num_examples
        return loss

    return Training(run_epochs, workload.steps_per_epoch)


def _batches(workload: Workload, rank: int, num_ranks: int) -> list[tuple[Any, Any]]:
    """This rank's part of each batch, as tensors in memory: no loader is faster than none."""
    x, y = workload.arrays()
    if x.ndim == 4:
        x = np.ascontiguousarray(np.moveaxis(x, -1, 1))
    parts = (np.split(array, workload.steps_per_epoch) for array in (x, y))
    batches = []
    for x_batch, y_batch in zip(*parts, strict=True):
        x_part = torch.from_numpy(np.array_split(x_batch, num_ranks)[rank])
        y_part = torch.from_numpy(np.array_split(y_batch, num_ranks)[rank])
        if x_part.ndim == 4:
            x_part = x_part.to(memory_format=torch.channels_last)
        batches.append((x_part, y_part.long()))
    return batches


if __name__ == "__main__":
    serve(prepare)
