"""Trains with torchft's methods and writes down the losses, for the tests to read.

Run it from the repository's root, in an environment with torch 2.13.0 and torchft 0.2.0:

    python -m tests.parity.torch.torchft_reference

Two processes train, each with a manager of torchft's, whose lighthouse runs in the first one. The
managers average over torchft's process group on Gloo.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib
import importlib.metadata
import json
from collections.abc import Callable, Generator
from typing import Any

import numpy as np

from tests.parity.torch.problem import (
    LEARNING_RATE,
    MOMENTUM,
    NUM_REPLICAS,
    NUM_STEPS,
    OVERLAP,
    OWN_SHARE,
    PERIOD,
    STREAMED_STEPS,
)
from tests.parity.torch.processes import Model, named_weights, record, torch, train

_LIMIT = datetime.timedelta(seconds=30)


@contextlib.contextmanager
def _managed(rank: int) -> Generator[Any]:
    """Starts a manager; the first process also starts the lighthouse that all of them ask."""
    torchft: Any = importlib.import_module("torchft")
    coordination: Any = importlib.import_module("torchft.coordination")
    lighthouse: Any = None
    told: list[Any] = [None]
    if rank == 0:
        lighthouse = coordination.LighthouseServer(bind="127.0.0.1:0", min_replicas=NUM_REPLICAS)
        told = [lighthouse.address()]
    torch.distributed.broadcast_object_list(told)
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=_LIMIT),
        load_state_dict=lambda state: None,
        state_dict=dict,
        min_replica_size=NUM_REPLICAS,
        use_async_quorum=False,
        init_sync=False,
        replica_id=f"replica-{rank}",
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=told[0],
        hostname="127.0.0.1",
        timeout=_LIMIT,
    )
    try:
        yield manager
    finally:
        torch.distributed.barrier()
        manager.shutdown(wait=False)
        torch.distributed.barrier()
        if lighthouse is not None:
            lighthouse.shutdown()


def _local_sgd(rank: int) -> dict[str, np.ndarray]:
    methods: Any = importlib.import_module("torchft.local_sgd")
    model = Model()
    inner = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE / 4, momentum=MOMENTUM)
    with _managed(rank) as manager, methods.LocalSGD(manager, model, inner, PERIOD):
        losses = train(rank, NUM_STEPS, model, lambda place: inner.step(), list(model.parameters()))
    return {"losses": losses, **named_weights(model)}


def _diloco(rank: int) -> dict[str, np.ndarray]:
    methods: Any = importlib.import_module("torchft.local_sgd")
    model, inner = _with_adam()
    outer = _outer_optimizer(model)
    with _managed(rank) as manager, methods.DiLoCo(manager, [model], inner, outer, PERIOD):
        losses = train(rank, NUM_STEPS, model, lambda place: inner.step(), list(model.parameters()))
    return {"losses": losses, **named_weights(model)}


def _streaming_diloco(rank: int) -> dict[str, np.ndarray]:
    """Two fragments, the second layer first, as ours.

    torchft counts steps up to the one at which a fragment is taken, and ours up to the one at which
    it is sent. So the hooks of torchft begin `OVERLAP` steps later.
    """
    methods: Any = importlib.import_module("torchft.local_sgd")
    model, inner = _with_adam()
    fragments = [model.second, model.first]
    with _managed(rank) as manager, contextlib.ExitStack() as stack:
        diloco = methods.DiLoCo(
            manager,
            fragments,
            inner,
            [_outer_optimizer(one) for one in fragments],
            PERIOD,
            fragment_sync_delay=OVERLAP,
            fragment_update_alpha=OWN_SHARE,
        )

        def step(place: int) -> None:
            inner.step()
            if place == OVERLAP - 1:
                stack.enter_context(diloco)

        losses = train(rank, STREAMED_STEPS, model, step, list(model.parameters()))
    second, first = (list(one.original_parameters.values()) for one in diloco._fragments)
    whole = {f"weights {place}": one.numpy() for place, one in enumerate([*first, *second])}
    return {"losses": losses, **whole}


def _with_adam() -> tuple[Any, Any]:
    model = Model()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-12, weight_decay=0.01)


def _outer_optimizer(module: Any) -> Any:
    return torch.optim.SGD(module.parameters(), lr=0.7, momentum=0.9, nesterov=True)


_METHODS: dict[str, Callable[[int], dict[str, np.ndarray]]] = {
    "local_sgd": _local_sgd,
    "diloco": _diloco,
    "streaming_diloco": _streaming_diloco,
}


def main() -> None:
    """Trains in two processes and writes `recorded_torchft.npz`."""
    versions = {"torch": torch.__version__, "torchft": importlib.metadata.version("torchft")}
    record(_METHODS, "recorded_torchft.npz", json.dumps(versions))


if __name__ == "__main__":
    main()
