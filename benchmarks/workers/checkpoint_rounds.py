"""What each side of `benchmarks/checkpoint` measures: steps, and a save among them."""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = ["NUM_ARRAYS", "answer_saves", "first_values"]

NUM_ARRAYS = 16
_NUM_STEPS = 5


def first_values(place: int, size: int) -> np.ndarray[Any, Any]:
    """Returns what an array of the state begins with: numbers by chance, as weights are.

    Equal ones would be compressed to nothing by those that compress.

    Args:
        place: of the array.
        size: how many numbers.
    """
    return np.random.default_rng(place).standard_normal(size, "float32")


def answer_saves(
    step: Callable[[], None],
    save: Callable[[str, bool], Callable[[], None]],
) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Returns what answers a question for a save.

    Args:
        step: does a step of training, and waits for it.
        save: saves in a folder, behind training or not; returns what waits for it.

    Returns:
        Answers `{"folder": ..., "is_async": ...}` with seconds: `step`, of a step without a save;
        `blocked`, in the call that saves; `stall`, what that call and the step after it took
        beyond a step; `behind`, what steps until it was written took beyond that; `whole`, until
        it was written.
    """

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        folder = question["folder"]
        shutil.rmtree(folder, ignore_errors=True)
        step_s = statistics.median(_time_s(step) for _ in range(_NUM_STEPS))
        begun_s = time.perf_counter()
        wait = save(folder, question["is_async"])
        blocked_s = time.perf_counter() - begun_s
        first_s = _time_s(step)
        later_s = [_time_s(step) for _ in range(_NUM_STEPS - 1)]
        wait()
        whole_s = time.perf_counter() - begun_s
        shutil.rmtree(folder)
        return {
            "step": step_s,
            "blocked": blocked_s,
            "stall": blocked_s + max(0.0, first_s - step_s),
            "behind": sum(later_s) - step_s * len(later_s),
            "whole": whole_s,
        }

    return answer


def _time_s(function: Callable[[], None]) -> float:
    begun_s = time.perf_counter()
    function()
    return time.perf_counter() - begun_s
