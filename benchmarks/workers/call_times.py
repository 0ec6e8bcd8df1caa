"""What each side of `benchmarks/transport` measures: calls that carry an array there or back."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = ["answer_calls", "values_of"]

Array = np.ndarray[Any, Any]


def answer_calls(
    pull: Callable[[int], Array], push: Callable[[Array], float]
) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Returns what answers a question for calls.

    Args:
        pull: asks the other process for so many numbers, those of `values_of`.
        push: sends numbers, and returns the last one as the other process found it.

    Returns:
        Answers `{"direction": "pull" or "push", "bytes": ..., "calls": ...}` with the `seconds` of
        each call.
    """

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        size = question["bytes"] // 4
        values = values_of(size)
        seconds: list[float] = []
        for _ in range(question["calls"]):
            begun_s = time.perf_counter()
            last = push(values) if question["direction"] == "push" else pull(size)[-1]
            seconds.append(time.perf_counter() - begun_s)
            if last != values[-1]:
                raise RuntimeError(f"{last} came as the last number, and it is {values[-1]}")
        return {"seconds": seconds}

    return answer


def values_of(size: int) -> Array:
    """Returns the numbers that travel: the last one says how many."""
    return np.arange(1, size + 1, dtype=np.float32)
