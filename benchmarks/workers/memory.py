"""Tells which GPU is here, and how much memory it and the host have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax

from benchmarks.workers.protocol import WorkerOptions, answer_once

__all__ = ["find_memory", "free_bytes"]


def find_memory(options: WorkerOptions) -> dict[str, Any]:
    """Returns the kind of the GPU, "" for none, its memory, and what is free of the host's."""
    device = jax.devices()[0]
    is_gpu = device.platform == "gpu"
    stats = (device.memory_stats() if is_gpu else None) or {}
    return {
        "device_kind": device.device_kind if is_gpu else "",
        "gpu_bytes": stats.get("bytes_limit", 0),
        "host_bytes": free_bytes(Path("/proc/meminfo")),
    }


def free_bytes(path: Path) -> int:
    """Returns what Linux could give to a process; 0 where it does not say.

    Args:
        path: of the file in which it says so.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return 1024 * int(found[0]) if found else 0


if __name__ == "__main__":
    answer_once(find_memory)
