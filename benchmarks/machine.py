"""What the figures were measured on."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path
from typing import Any

__all__ = ["busy_cores", "describe_machine", "load_warning"]

_QUIET_LOAD = 0.5


def describe_machine(accelerator: str | None) -> dict[str, Any]:
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "accelerator": accelerator,
        "load": os.getloadavg()[0],
    }


def load_warning(load: float) -> str | None:
    """Says that something else runs here; None if nothing does.

    Args:
        load: runnable processes, averaged over the last minute.
    """
    if load <= _QUIET_LOAD:
        return None
    return (
        f"The load of this machine is {load:.1f} before the benchmark starts: something else "
        "runs, and the figures are not to be trusted."
    )


def busy_cores(duration_s: float) -> float:
    """Returns the cores that all programs together used on average while this one slept.

    Where Linux's `/proc/stat` is missing, returns the load average.
    """
    before_s = _busy_s()
    time.sleep(duration_s)
    after_s = _busy_s()
    if before_s is None or after_s is None:
        return os.getloadavg()[0]
    return (after_s - before_s) / duration_s


def _busy_s() -> float | None:
    """Returns the seconds of all cores since the start of the system that were not idle."""
    try:
        first = Path("/proc/stat").read_text(encoding="utf-8").split("\n", 1)[0]
    except OSError:
        return None
    user, nice, system, _, _, *others = map(int, first.split()[1:9])
    return sum((user, nice, system, *others)) / os.sysconf("SC_CLK_TCK")


def _cpu_model() -> str:
    """Linux says it here; `platform` knows it on the others."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
