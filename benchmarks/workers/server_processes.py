"""Processes that serve until whoever has started them ends, however that ends."""

from __future__ import annotations

import subprocess
import sys

__all__ = ["start_server"]

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
