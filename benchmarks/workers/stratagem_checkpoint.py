"""Ours: saves of a state of variables while steps change it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import stratagem as sg  # isort: skip - before jax, because it chooses Keras's backend

import jax

from benchmarks.workers.checkpoint_rounds import NUM_ARRAYS, State, answer_rounds, first_values
from benchmarks.workers.peak_memory import memory_bytes
from benchmarks.workers.protocol import serve_questions

__all__ = ["prepare"]


def prepare() -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Answers how long saves and restores take, and how long training waits for them."""
    question = json.loads(sys.argv[1])
    size = question["bytes"] // 4 // NUM_ARRAYS
    base_bytes = memory_bytes()
    strategy = sg.OneDeviceStrategy("cpu:0")
    with strategy.scope():
        variables = [sg.Variable(first_values(i, size)) for i in range(NUM_ARRAYS)]
    checkpoint = sg.train.Checkpoint(**{f"v{i}": one for i, one in enumerate(variables)})

    if question["is_async"]:
        checkpoint.prepare()
        checkpoint.sync()  # done long before the first save of a real training

    def replica_step() -> None:
        for one in variables:
            one.assign(one.value * 0.999 + 0.001)

    def step() -> None:
        strategy.run(replica_step)
        jax.block_until_ready([one.value for one in variables])

    def save(folder: str, is_async: bool) -> Callable[[], None]:
        checkpoint.write(folder, sg.train.CheckpointOptions(enable_async=is_async))
        return checkpoint.sync

    def restore(folder: str) -> None:
        checkpoint.read(folder).assert_consumed()
        jax.block_until_ready([one.value for one in variables])

    def first_value() -> float:
        return float(variables[0].value[0])

    step()
    return answer_rounds(State(4 * size * NUM_ARRAYS, base_bytes, step, save, restore, first_value))


if __name__ == "__main__":
    serve_questions(prepare)
