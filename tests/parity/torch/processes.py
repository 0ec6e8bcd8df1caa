"""Processes of PyTorch that train the problem together; needs PyTorch."""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.parity.torch.problem import BATCH_SIZE, NUM_REPLICAS, examples, initial_weights

torch: Any = importlib.import_module("torch")
FOLDER = Path(__file__).parent

__all__ = ["FOLDER", "Dense", "Model", "named_weights", "record", "torch", "train"]

Method = Callable[[int], dict[str, np.ndarray]]


class Dense(torch.nn.Module):
    """A dense layer whose kernel has the shape of Keras's."""

    def __init__(self, kernel: np.ndarray, bias: np.ndarray) -> None:
        super().__init__()
        self.kernel, self.bias = (
            torch.nn.Parameter(torch.tensor(value)) for value in (kernel, bias)
        )

    def forward(self, x: Any) -> Any:
        return x @ self.kernel + self.bias


class Model(torch.nn.Module):
    """Two dense layers."""

    def __init__(self) -> None:
        super().__init__()
        values = initial_weights()
        self.first, self.second = Dense(*values[:2]), Dense(*values[2:])

    def forward(self, x: Any) -> Any:
        return self.second(torch.relu(self.first(x)))


def named_weights(model: Any, name: str = "weights") -> dict[str, np.ndarray]:
    """Returns copies of the weights, by name and place."""
    return {
        f"{name} {place}": value.detach().numpy().copy()
        for place, value in enumerate(model.parameters())
    }


def train(
    rank: int, num_steps: int, forward: Any, step: Callable[[int], None], parameters: list[Any]
) -> np.ndarray:
    """Returns the loss of each step, averaged over the processes."""
    x, y = examples()
    own = slice(rank * BATCH_SIZE // NUM_REPLICAS, (rank + 1) * BATCH_SIZE // NUM_REPLICAS)
    losses: list[float] = []
    for place in range(num_steps):
        for one in parameters:
            one.grad = None
        target = torch.tensor(y[place, own], dtype=torch.int64)
        loss = torch.nn.functional.cross_entropy(forward(torch.tensor(x[place, own])), target)
        loss.backward()
        step(place)
        told = loss.detach().clone()
        torch.distributed.all_reduce(told)
        losses.append(float(told) / NUM_REPLICAS)
    return np.array(losses)


def record(methods: dict[str, Method], file: str, about: str) -> None:
    """Trains with each method in two processes, and writes losses and weights to a file.

    Args:
        methods: what trains, given the rank, by name.
        file: name of the file, in this folder.
        about: versions, as JSON.
    """
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_process, (folder, methods, file, about), nprocs=NUM_REPLICAS)


def _process(rank: int, folder: str, methods: dict[str, Method], file: str, about: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=NUM_REPLICAS
    )
    arrays: dict[str, np.ndarray] = {}
    for name, method in methods.items():
        torch.distributed.barrier()
        arrays |= {f"{name}/{key}": value for key, value in method(rank).items()}
    if rank == 0:
        told: Any = {**arrays, "about": np.array(about)}
        np.savez_compressed(FOLDER / file, **told)
        for name in methods:
            losses = arrays[f"{name}/losses"]
            print(f"{name}: loss from {losses[0]:.4f} to {losses[-1]:.4f}")
    torch.distributed.destroy_process_group()
