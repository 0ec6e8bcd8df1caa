"""Running processes, their descendants, and what they print."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Iterable
from pathlib import Path

__all__ = ["PrintedLines", "descendants", "name_of", "wait_for_end"]


class PrintedLines:
    """What a program prints, line by line."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as pipe:
            self.lines.extend(pipe)

    def wait_for(self, start: str, timeout_s: float = 200.0) -> str:
        """Waits for a line that begins like this, and returns it."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            for line in self.lines:
                if line.startswith(start):
                    return line
            threading.Event().wait(0.05)
        raise AssertionError(f"{start!r} is not among {self.lines}")

    def end(self) -> tuple[int, str]:
        """Waits for the end; returns the exit code and all that was printed."""
        code = self.process.wait(timeout=300)
        self._thread.join(120)
        return code, "".join(self.lines)

    def close(self) -> None:
        """Kills a program that still runs; what it has started ends with it."""
        self.process.kill()
        self.end()
        if self.process.stdin is not None:
            self.process.stdin.close()


def _stat(pid: int | str) -> list[str]:
    """State, parent, ... of a process; nothing of one that has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return []
    return stat.rpartition(")")[2].split()


def descendants(pid: int) -> set[int]:
    """All that a process has started, and what those have."""
    parents = {
        int(path.name): int(stat[1])
        for path in Path("/proc").glob("[0-9]*")
        if (stat := _stat(path.name))
    }
    found: set[int] = set()
    new = {pid}
    while new:
        new = {one for one, parent in parents.items() if parent in new}
        found |= new
    return found


def name_of(pid: int) -> str:
    """What a process calls itself; "" where it has ended."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ""
    return command.rstrip(b"\0 ").decode(errors="replace")


def wait_for_end(pids: Iterable[int], *, timeout_s: float = 20.0) -> set[int]:
    """Waits for processes to end; returns those that still live."""
    left, deadline_s = set(pids), time.monotonic() + timeout_s
    while left:
        left = {pid for pid in left if (stat := _stat(pid)) and stat[0] not in "ZX"}
        if time.monotonic() > deadline_s:
            break
        threading.Event().wait(0.02)
    return left
