"""What the figures were measured on."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

__all__ = ["describe_machine", "load_warning"]

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
