"""Ours: sums of arrays over replicas by each algorithm, as one of the processes of a cluster."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import stratagem as sg  # isort: skip - before jax, because it readies the collectives

from benchmarks.workers.protocol import serve_questions
from stratagem.devices.collectives.measurement import measure_times

__all__ = ["prepare"]


def prepare() -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Answers how long a sum takes by each algorithm, and which of them AUTO chooses."""
    strategy = sg.MultiWorkerMirroredStrategy()
    choice = strategy.cross_device_ops.all_reduce(strategy.topology).choice

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        size = question["bytes"]
        times_s = measure_times(strategy.topology, (size,), num_rounds=question["rounds"])
        return {
            "seconds": {algorithm.value: times[size] for algorithm, times in times_s.items()},
            "chosen": choice.algorithm(size).value,
        }

    return answer


if __name__ == "__main__":
    serve_questions(prepare)
