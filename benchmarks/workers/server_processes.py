"""Processes that serve until whoever has started them ends, however that ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

__all__ = ["server_cpu_s", "server_ids", "start_server"]

# A pipe is closed when nobody holds it any more.
_started: list[subprocess.Popen[str]] = []


def start_server(module: str, *arguments: str) -> subprocess.Popen[str]:
    """Starts a program that ends when its stdin does.

    Args:
        module: in `benchmarks.workers`.
        *arguments: of its command line.

    Returns:
        The process, with pipes for stdin and stdout.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", f"benchmarks.workers.{module}", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    _started.append(process)
    return process


def server_ids() -> list[int]:
    """Returns the ids of all processes that were started here."""
    return [process.pid for process in _started]


def server_cpu_s() -> float:
    """Returns the processor time of all processes that were started here, in seconds."""
    stats = [Path(f"/proc/{process.pid}/stat").read_text("ascii") for process in _started]
    # After the name in parentheses, times of user and system are fields 12 and 13.
    ticks = [sum(map(int, stat.rpartition(")")[2].split()[11:13])) for stat in stats]
    return sum(ticks) / os.sysconf("SC_CLK_TCK")
