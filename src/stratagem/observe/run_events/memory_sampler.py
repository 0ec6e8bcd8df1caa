"""A thread that records the memory of this process every few seconds, as a sign of life."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from stratagem.observe.run_events.writer import EventWriter

SAMPLE_INTERVAL_S = 5.0
STOP_LIMIT_S = 1.0

# Returns the memory in use on the fullest device and the memory of that device; None is unknown.
DeviceMemory: TypeAlias = Callable[[], tuple[int | None, int | None]]

_STATM = Path("/proc/self/statm")


class MemorySampler:
    """Samples at once, then every `interval_s` until `stop`. Costs the training thread nothing."""

    def __init__(self, writer: EventWriter, interval_s: float = SAMPLE_INTERVAL_S) -> None:
        self.device_memory: DeviceMemory | None = None
        self._writer = writer
        self._interval_s = interval_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stratagem-events", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread; waits at most `STOP_LIMIT_S` for a sample in progress."""
        self._stopped.set()
        self._thread.join(STOP_LIMIT_S)

    def sample(self) -> None:
        """Records the memory in use now."""
        used, limit = (None, None) if self.device_memory is None else self.device_memory()
        self._writer.memory(resident_bytes(), used, limit)

    def _run(self) -> None:
        while True:
            self.sample()
            if self._stopped.wait(self._interval_s):
                return


def resident_bytes() -> int | None:
    """Returns the resident memory of this process, or None where /proc lacks it."""
    try:
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (IndexError, OSError, ValueError):
        return None
