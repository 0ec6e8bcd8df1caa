"""A device that waits for input: its steps take a fixed time, and its busy time is measured.

A step stands for a device that trains: the host sleeps through it, so that the cores are free for
input. As with JAX, the host does not wait for a step before it takes the next batch.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.workers.protocol import serve_questions

__all__ = ["StarvedOptions", "serve_batches", "tree_cpu_s"]

_WARM_UP = 0.6  # in parts of what is measured


@dataclasses.dataclass(frozen=True)
class StarvedOptions:
    """What feeds the device.

    Args:
        work: one of `input_work.WORK`.
        num_workers: processes that make batches; 0 for the loop of the trainer itself.
        step_s: seconds of a step.
    """

    work: str
    num_workers: int
    step_s: float


class _Device:
    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._memory: dict[int, np.ndarray[Any, Any]] = {}
        self.free_s = time.perf_counter()

    def step(self, arrays: Any) -> None:
        """Copies a batch as a transfer does, and begins its step; one step at most waits."""
        for place, array in enumerate(arrays):
            if place not in self._memory:
                self._memory[place] = np.empty_like(array)
            np.copyto(self._memory[place], array)
        time.sleep(max(0.0, self.free_s - self._step_s - time.perf_counter()))
        self.free_s = max(self.free_s, time.perf_counter()) + self._step_s


def _measure(
    batches: Iterator[Any], options: StarvedOptions, seconds: float, cpu_s: Callable[[], float]
) -> dict[str, float]:
    device = _Device(options.step_s)
    device.step(next(batches))
    first_s = device.free_s
    # All workers are there by then, and what they made before the first step is used.
    while device.free_s < first_s + _WARM_UP * seconds:
        device.step(next(batches))
    begin_s, begin_cpu_s, num_steps = device.free_s, cpu_s(), 0
    while device.free_s < begin_s + seconds:
        device.step(next(batches))
        num_steps += 1
    return {
        "busy": num_steps * options.step_s / (device.free_s - begin_s),
        "batches_per_s": num_steps / (device.free_s - begin_s),
        "cpu_s": (cpu_s() - begin_cpu_s) / num_steps,
    }


def serve_batches(make: Callable[[StarvedOptions], AbstractContextManager[Iterator[Any]]]) -> None:
    """Answers how busy a device is that gets these batches, `{"seconds": ...}` each time."""
    options = StarvedOptions(**json.loads(sys.argv[1]))
    with make(options) as batches:
        serve_questions(
            lambda: lambda asked: _measure(batches, options, asked["seconds"], tree_cpu_s)
        )


def tree_cpu_s() -> float:
    """Returns the processor time of this process and of all below it, as far as they live."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text(encoding="utf-8").rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        number = int(path.parent.name)
        parents[number], ticks[number] = int(fields[1]), int(fields[11]) + int(fields[12])
    tree, num_before = {os.getpid()}, 0
    while len(tree) > num_before:
        num_before = len(tree)
        tree |= {number for number, parent in parents.items() if parent in tree}
    return sum(ticks[number] for number in tree) / os.sysconf("SC_CLK_TCK")
