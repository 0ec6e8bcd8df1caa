"""Trains with PyTorch's own methods and writes down the losses, for the tests to read.

Run it from the repository's root, with `.venv-peers`, which `make .venv-peers/.complete` makes:

    python -m tests.parity.torch.reference

Two processes train with torch.distributed on Gloo: with the hooks for PowerSGD and float16, with
PostLocalSGDOptimizer, and with DiLoCo, for which PyTorch has the outer optimizer: its own SGD.
"""

from __future__ import annotations

import copy
import importlib
import json
from typing import Any

import numpy as np

from tests.parity.torch.problem import (
    LEARNING_RATE,
    MOMENTUM,
    NUM_REPLICAS,
    NUM_STEPS,
    PERIOD,
    RANK,
    WHOLE_STEPS,
)
from tests.parity.torch.processes import Model, named_weights, record, torch, train

_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks"


def _with_hook(rank: int, name: str) -> dict[str, np.ndarray]:
    """DistributedDataParallel with a hook, and SGD without momentum."""
    model = Model()
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
            found.update(named_weights(model, "begin"))

    losses = train(rank, NUM_STEPS, parallel, step, list(parallel.parameters()))
    return {**found, "losses": losses, **named_weights(model)}


def _first_factors(state: Any, bucket: Any) -> dict[str, np.ndarray]:
    """Draws what the hook is about to draw, in the order of the bucket."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(copy.deepcopy(state.rng).randint(1_000_000_000))
        kernels = [one for one in bucket.gradients() if one.ndim == 2]
        return {
            f"factor of {one.shape[0]}": torch.randn(1, one.shape[1], RANK)[0].numpy()
            for one in kernels
        }


def _power_sgd(rank: int) -> dict[str, np.ndarray]:
    return _with_hook(rank, "power_sgd")


def _float16(rank: int) -> dict[str, np.ndarray]:
    return _with_hook(rank, "float16")


def _local_sgd(rank: int) -> dict[str, np.ndarray]:
    averagers = importlib.import_module("torch.distributed.algorithms.model_averaging.averagers")
    model = Model()
    inner = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE / 4, momentum=MOMENTUM)
    # Its first average comes after `warmup_steps` steps and one more.
    averager = averagers.PeriodicModelAverager(period=PERIOD, warmup_steps=PERIOD - 1)
    optimizer = importlib.import_module("torch.distributed.optim").PostLocalSGDOptimizer(
        optim=inner, averager=averager
    )
    losses = train(rank, NUM_STEPS, model, lambda place: optimizer.step(), list(model.parameters()))
    return {"losses": losses, **named_weights(model)}


def _diloco(rank: int) -> dict[str, np.ndarray]:
    model = Model()
    own = list(model.parameters())
    whole = [value.detach().clone() for value in own]
    inner = torch.optim.AdamW(own, lr=0.01, eps=1e-12, weight_decay=0.01)
    outer = torch.optim.SGD(whole, lr=0.7, momentum=0.9, nesterov=True)

    def step(place: int) -> None:
        inner.step()
        if (place + 1) % PERIOD:
            return
        for mine, one in zip(own, whole, strict=True):
            mean = mine.detach().clone()
            torch.distributed.all_reduce(mean)
            one.grad = one - mean / NUM_REPLICAS
        outer.step()
        with torch.no_grad():
            for mine, one in zip(own, whole, strict=True):
                mine.copy_(one)

    losses = train(rank, NUM_STEPS, model, step, own)
    return {"losses": losses, **named_weights(model)}


_METHODS = {
    "power_sgd": _power_sgd,
    "float16": _float16,
    "local_sgd": _local_sgd,
    "diloco": _diloco,
}


def main() -> None:
    """Trains in two processes and writes `recorded.npz`."""
    record(_METHODS, "recorded.npz", json.dumps({"torch": torch.__version__}))


if __name__ == "__main__":
    main()
