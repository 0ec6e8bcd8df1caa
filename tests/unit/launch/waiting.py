"""Waits for other processes, no longer than needed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

_DEADLINE_S = 120
_PAUSE_S = 0.01


def until(condition: Callable[[], object]) -> None:
    """Returns when the condition holds; fails if it never does."""
    deadline_s = time.monotonic() + _DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, "waited in vain"
        time.sleep(_PAUSE_S)


def is_running(pid: int) -> bool:
    """Whether a process runs; a dead one that nobody has waited for does not."""
    with contextlib.suppress(OSError):
        stat = Path(f"/proc/{pid}/stat").read_text()
        return stat.rpartition(")")[2].split()[0] not in ("Z", "X")
    return False


def number_in(path: Path) -> int:
    """The number that a task writes into a file, when it has."""
    until(lambda: path.exists() and path.read_text().endswith("\n"))
    return int(path.read_text())
