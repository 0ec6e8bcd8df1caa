"""Steps of a large state on the device while it is saved: how long a step is delayed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.gpu.options import SideOptions
from benchmarks.gpu.workers.measurement import Figures, take

__all__ = ["NUM_ARRAYS", "measure_saves"]

NUM_ARRAYS = 40
_NUM_STEPS = 20
_NUM_SAVES = 2  # the first one may allocate the memory that the second one reuses
_LIMIT_S = 60.0


def measure_saves(
    options: SideOptions,
    figures: Figures,
    step: Callable[[], None],
    save: Callable[[str], Callable[[], bool]],
) -> None:
    """Writes down, for each save: the median step before it, the seconds in the call that saves,
    the longest step until it is written, the sum of all delays, and the seconds until then.

    Args:
        options: of the side.
        figures: those of the side.
        step: does a step of training, and waits for the device.
        save: begins a save to a folder; returns what says whether it is written.
    """
    step()
    saves: list[dict[str, Any]] = []
    for index in range(_NUM_SAVES):
        step_s = statistics.median(take(step)[0] for _ in range(_NUM_STEPS))
        folder = str(Path(options.folder) / str(index))
        begun_s = time.perf_counter()
        is_written = save(folder)
        blocked_s = time.perf_counter() - begun_s
        figures.add(stage=f"save {index + 1} is written", blocked_s=blocked_s, step_s=step_s)
        durations = [take(step)[0]]
        while not is_written() and time.perf_counter() - begun_s < _LIMIT_S:
            durations.append(take(step)[0])
        whole_s = time.perf_counter() - begun_s
        saves.append(
            {
                "step_s": step_s,
                "blocked_s": blocked_s,
                "longest_step_s": max(durations),
                "stall_s": blocked_s + max(0.0, durations[0] - step_s),
                "delay_s": blocked_s + sum(max(0.0, one - step_s) for one in durations),
                "whole_s": whole_s,
                "num_steps": len(durations),
                "is_written": is_written(),
                "state_bytes": options.state_bytes,
            }
        )
        figures.add(stage=f"save {index + 1}", saves=saves)
