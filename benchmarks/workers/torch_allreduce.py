"""Peer: `torch.distributed.all_reduce` over Gloo, as one rank."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.workers.protocol import serve_questions

# As `stratagem_allreduce` counts the sums of a round.
_ROUND_BYTES = 2**22
_MIN_SUMS, _MAX_SUMS = 2, 20


def prepare() -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Answers how long a sum takes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        array = torch.zeros(question["bytes"] // 4)
        num_sums = min(max(_ROUND_BYTES // question["bytes"], _MIN_SUMS), _MAX_SUMS)
        rounds: list[float] = []
        for _ in range(question["rounds"] + 1):
            started_s = time.perf_counter()
            for _ in range(num_sums):
                dist.all_reduce(array)
            rounds.append((time.perf_counter() - started_s) / num_sums)
        return {"seconds": {"Gloo": statistics.median(rounds[1:])}, "chosen": "Gloo"}

    return answer


if __name__ == "__main__":
    serve_questions(prepare)
