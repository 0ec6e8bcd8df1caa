"""A worker's half of the conversation with the benchmark: a size is answered by costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TypeAlias

from benchmarks.workers.protocol import serve_questions

__all__ = ["Answer", "cpu_and_elapsed_s", "cpu_s", "elapsed_s", "least", "serve_costs"]

Answer: TypeAlias = Mapping[str, Mapping[str, float]]
"""Seconds by cost, of "ours" and, for some axes, "by hand"."""


def serve_costs(measure: Callable[..., Answer]) -> None:
    """Answers each question by what a function measures with its fields as arguments."""
    serve_questions(lambda: lambda question: dict(measure(**question)))


def elapsed_s(act: Callable[[], object]) -> float:
    """Returns how long a call takes."""
    return cpu_and_elapsed_s(act)[1]


def cpu_s(act: Callable[[], object]) -> float:
    """Returns the CPU time of a call, of all threads of this process."""
    return cpu_and_elapsed_s(act)[0]


def cpu_and_elapsed_s(act: Callable[[], object]) -> tuple[float, float]:
    """Returns the CPU time of a call, and how long it takes."""
    begun_cpu_s, begun_s = time.process_time(), time.perf_counter()
    act()
    return time.process_time() - begun_cpu_s, time.perf_counter() - begun_s


def least(num_times: int, measure: Callable[[], float]) -> float:
    """Returns the least of several results: a pause of the machine is no cost."""
    return min(measure() for _ in range(num_times))
