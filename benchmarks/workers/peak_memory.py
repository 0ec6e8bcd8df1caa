"""The largest memory of a process and of those that it started."""

from __future__ import annotations

import os
import threading
from pathlib import Path

__all__ = ["PeakMemory", "memory_bytes"]

_INTERVAL_S = 0.05


def memory_bytes() -> int:
    """Returns the memory of this process and its children; what they share counts once.

    Mapped files do not count: the page cache can drop them.
    """
    statuses = [_status(pid) for pid in (os.getpid(), *_children())]
    anonymous_bytes = sum(status.get("RssAnon", 0) for status in statuses)
    return anonymous_bytes + max(status.get("RssShmem", 0) for status in statuses)


class PeakMemory:
    """Samples memory in a thread; `bytes` is the largest found. Use as a context manager."""

    def __init__(self) -> None:
        self.bytes = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _sample(self) -> None:
        while True:
            self.bytes = max(self.bytes, memory_bytes())
            if self._ended.wait(_INTERVAL_S):
                return


def _children() -> list[int]:
    found: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        try:
            found += map(int, (task / "children").read_text(encoding="utf-8").split())
        except OSError:  # the thread has ended
            continue
    return found


def _status(pid: int) -> dict[str, int]:
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    pairs = (line.split() for line in lines if line.startswith("Rss"))
    return {name.rstrip(":"): int(kilobytes) * 1024 for name, kilobytes, *_ in pairs}
