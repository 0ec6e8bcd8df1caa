"""Reference: torch.distributed.checkpoint, on a state of tensors that steps change in place."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from benchmarks.workers.checkpoint_rounds import NUM_ARRAYS, State, answer_rounds, first_values
from benchmarks.workers.peak_memory import memory_bytes
from benchmarks.workers.protocol import serve_questions

__all__ = ["prepare"]


def prepare() -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Answers how long saves and restores take, and how long training waits for them."""
    size = json.loads(sys.argv[1])["bytes"] // 4 // NUM_ARRAYS
    base_bytes = memory_bytes()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=0, world_size=1)
    state = {f"v{i}": torch.from_numpy(first_values(i, size)) for i in range(NUM_ARRAYS)}

    def step() -> None:
        for value in state.values():
            value.mul_(0.999).add_(0.001)

    def save(folder: str, is_async: bool) -> Callable[[], None]:
        if not is_async:
            dcp.save(state, checkpoint_id=folder)
            return lambda: None
        writing: Any = dcp.async_save(state, checkpoint_id=folder)
        return lambda: writing.result()

    def restore(folder: str) -> None:
        dcp.load(state, checkpoint_id=folder)

    def first_value() -> float:
        return float(state["v0"][0])

    step()
    return answer_rounds(State(4 * size * NUM_ARRAYS, base_bytes, step, save, restore, first_value))


if __name__ == "__main__":
    serve_questions(prepare)
