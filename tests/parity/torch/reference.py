"""Trains with PyTorch's own methods and writes down the losses, for the tests to read.

Run it from the repository's root, in the environment of `make peers`:

    python -m tests.parity.torch.reference

Two processes train with torch.distributed on Gloo: with the hooks for PowerSGD and float16, with
PostLocalSGDOptimizer, and with DiLoCo, for which PyTorch has the outer optimizer: its own SGD.
"""

from __future__ import annotations

import copy
import importlib
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.parity.torch.problem import (
    BATCH_SIZE,
    LEARNING_RATE,
    MOMENTUM,
    NUM_REPLICAS,
    NUM_STEPS,
    PERIOD,
    RANK,
    WHOLE_STEPS,
    examples,
    initial_weights,
)

torch: Any = importlib.import_module("torch")
_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks"
FOLDER = Path(__file__).parent


class _Model(torch.nn.Module):
    """Two dense layers whose kernels have the shape of Keras's."""

    def __init__(self) -> None:
        super().__init__()
        values = [torch.nn.Parameter(torch.tensor(value)) for value in initial_weights()]
        self.values = torch.nn.ParameterList(values)

    def forward(self, x: Any) -> Any:
        first, first_bias, second, second_bias = self.values
        return torch.relu(x @ first + first_bias) @ second + second_bias


def _weights(model: Any) -> list[np.ndarray]:
    return [value.detach().numpy().copy() for value in model.values]


def _train(
    rank: int, forward: Any, step: Callable[[int], None], parameters: list[Any]
) -> list[float]:
    """Returns the loss of each step, averaged over the processes."""
    x, y = examples()
    own = slice(rank * BATCH_SIZE // NUM_REPLICAS, (rank + 1) * BATCH_SIZE // NUM_REPLICAS)
    losses: list[float] = []
    for place in range(NUM_STEPS):
        for one in parameters:
            one.grad = None
        target = torch.tensor(y[place, own], dtype=torch.int64)
        loss = torch.nn.functional.cross_entropy(forward(torch.tensor(x[place, own])), target)
        loss.backward()
        step(place)
        told = loss.detach().clone()
        torch.distributed.all_reduce(told)
        losses.append(float(told) / NUM_REPLICAS)
    return losses


def _with_hook(rank: int, name: str) -> dict[str, np.ndarray]:
    """DistributedDataParallel with a hook, and SGD without momentum."""
    model = _Model()
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    found: dict[str, np.ndarray] = {}
    if name == "power_sgd":
        hooks = importlib.import_module(f"{_HOOKS}.powerSGD_hook")
        state = hooks.PowerSGDState(None, RANK, WHOLE_STEPS)

        def hook(state: Any, bucket: Any) -> Any:
            if state.iter == WHOLE_STEPS and not state.p_memory_dict:
                found.update(_first_factors(state, bucket))
            return hooks.powerSGD_hook(state, bucket)

        # It is compared with the class itself.
        hook.__annotations__["bucket"] = torch.distributed.GradBucket
        hook.__annotations__["return"] = torch.futures.Future[torch.Tensor]
        parallel.register_comm_hook(state, hook)
    else:
        hooks = importlib.import_module(f"{_HOOKS}.default_hooks")
        parallel.register_comm_hook(None, hooks.fp16_compress_hook)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=LEARNING_RATE)

    def step(place: int) -> None:
        optimizer.step()
        if place == WHOLE_STEPS - 1:
            found.update({f"begin {n}": one for n, one in enumerate(_weights(model))})

    losses = _train(rank, parallel, step, list(parallel.parameters()))
    return {**found, "losses": np.array(losses), **_named(model)}


def _first_factors(state: Any, bucket: Any) -> dict[str, np.ndarray]:
    """Draws what the hook is about to draw, in the order of the bucket."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(copy.deepcopy(state.rng).randint(1_000_000_000))
        kernels = [one for one in bucket.gradients() if one.ndim == 2]
        return {
            f"factor of {one.shape[0]}": torch.randn(1, one.shape[1], RANK)[0].numpy()
            for one in kernels
        }


def _local_sgd(rank: int) -> dict[str, np.ndarray]:
    averagers = importlib.import_module("torch.distributed.algorithms.model_averaging.averagers")
    model = _Model()
    inner = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE / 4, momentum=MOMENTUM)
    # Its first average comes after `warmup_steps` steps and one more.
    averager = averagers.PeriodicModelAverager(period=PERIOD, warmup_steps=PERIOD - 1)
    optimizer = importlib.import_module("torch.distributed.optim").PostLocalSGDOptimizer(
        optim=inner, averager=averager
    )
    losses = _train(rank, model, lambda place: optimizer.step(), list(model.parameters()))
    return {"losses": np.array(losses), **_named(model)}


def _diloco(rank: int) -> dict[str, np.ndarray]:
    model = _Model()
    whole = [value.detach().clone() for value in model.values]
    inner = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-12, weight_decay=0.01)
    outer = torch.optim.SGD(whole, lr=0.7, momentum=0.9, nesterov=True)

    def step(place: int) -> None:
        inner.step()
        if (place + 1) % PERIOD:
            return
        for mine, one in zip(model.values, whole, strict=True):
            mean = mine.detach().clone()
            torch.distributed.all_reduce(mean)
            one.grad = one - mean / NUM_REPLICAS
        outer.step()
        with torch.no_grad():
            for mine, one in zip(model.values, whole, strict=True):
                mine.copy_(one)

    losses = _train(rank, model, step, list(model.parameters()))
    return {"losses": np.array(losses), **_named(model)}


def _named(model: Any) -> dict[str, np.ndarray]:
    return {f"weights {place}": one for place, one in enumerate(_weights(model))}


_METHODS: dict[str, Callable[[int], dict[str, np.ndarray]]] = {
    "power_sgd": lambda rank: _with_hook(rank, "power_sgd"),
    "float16": lambda rank: _with_hook(rank, "float16"),
    "local_sgd": _local_sgd,
    "diloco": _diloco,
}


def _process(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=NUM_REPLICAS
    )
    arrays: dict[str, np.ndarray] = {}
    for name, method in _METHODS.items():
        torch.distributed.barrier()
        arrays |= {f"{name}/{key}": value for key, value in method(rank).items()}
    if rank == 0:
        told: Any = {**arrays, "about": np.array(json.dumps({"torch": torch.__version__}))}
        np.savez_compressed(FOLDER / "recorded.npz", **told)
        for name in _METHODS:
            losses = arrays[f"{name}/losses"]
            print(f"{name}: loss from {losses[0]:.4f} to {losses[-1]:.4f}")
    torch.distributed.destroy_process_group()


def main() -> None:
    """Trains in two processes and writes `recorded.npz`."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_process, (folder,), nprocs=NUM_REPLICAS)


if __name__ == "__main__":
    main()
