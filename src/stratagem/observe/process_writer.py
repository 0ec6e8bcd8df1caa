"""The event writer of this process, opened on first use if STRATAGEM_RUN_DIR is set."""

from __future__ import annotations

import atexit
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import SupportsFloat, TypeAlias

from stratagem import environment
from stratagem.cluster.detection import detect
from stratagem.errors import INTERRUPTED
from stratagem.observe.wait_clock import StepWaits, wait_clock
from stratagem.observe.writer import EventWriter

# A thread that records the memory of this process every few seconds, as a sign of life.

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


PROGRESS_INTERVAL_S = 5.0

_STAT = Path("/proc/self/stat")


class _EventState:
    writer: EventWriter | None = None
    sampler: MemorySampler | None = None
    progress_s: float = -math.inf
    waits: StepWaits | None = None  # at the last step of a custom loop
    exit_code: int = 0
    reason: str | None = None


_current = _EventState()
_lock = threading.Lock()


def current_events() -> EventWriter | None:
    """Returns the event writer of this process.

    The first call opens it, for the task that `sg.cluster.detect()` finds. It is closed when the
    process exits. A forked child writes nothing.

    Returns:
        The writer, or None if `STRATAGEM_RUN_DIR` is not set.

    Raises:
        ValueError: the environment describes an invalid cluster.

    Example:
        >>> sg.goodput.current_events() is None  # without STRATAGEM_RUN_DIR
        True

    Source: specific to Stratagem.
    """
    if _current.writer is None:
        run_dir = environment.lookup("STRATAGEM_RUN_DIR")
        if run_dir is None:
            return None
        with _lock:
            if _current.writer is None:
                _current.writer = writer = _open_writer(run_dir)
                _current.sampler = MemorySampler(writer)
                _watch_exceptions()
    return _current.writer


def step(step: int, *, num_steps: int = 1, duration_s: float | None = None) -> None:
    """Records that a custom training loop just finished one or more steps; `fit` does so itself.

    Does nothing if `STRATAGEM_RUN_DIR` is not set.

    Args:
        step: number of steps completed in the run so far, across restarts.
        num_steps: number of steps that the last call ran.
        duration_s: duration of that call in seconds; None for the time since the previous step.

    Raises:
        ValueError: `num_steps` is below 1 or above `step`, or the duration is negative.

    Example:
        >>> for step in range(1, 101):
        ...     sg.goodput.step(step)

    Source: specific to Stratagem.
    """
    events = current_events()
    if events is not None:
        events.step(step, num_steps=num_steps, duration_s=duration_s, waits=_new_waits())


def progress(
    values: Mapping[str, SupportsFloat] | None = None,
    *,
    total_steps: int | None = None,
    interval_s: float = PROGRESS_INTERVAL_S,
) -> None:
    """Records the loss and metrics of a custom training loop; `fit` does so itself.

    Call it after each step: values are read, and arrays waited for, once per interval. Does nothing
    if `STRATAGEM_RUN_DIR` is not set.

    Args:
        values: loss and metrics by name: numbers or arrays of one element.
        total_steps: number of steps after which training ends, or None if unknown.
        interval_s: seconds in which further calls are ignored; 0 records each call.

    Raises:
        TypeError: a value is no number.

    Example:
        >>> for step in range(1, 101):
        ...     sg.goodput.step(step)
        ...     sg.goodput.progress({"loss": 1 / step}, total_steps=100)

    Source: specific to Stratagem.
    """
    events = current_events()
    if events is not None and is_progress_due(interval_s):
        events.progress(values, total_steps=total_steps)


def is_progress_due(interval_s: float = PROGRESS_INTERVAL_S) -> bool:
    """Returns True at most once per interval; the caller then records the progress."""
    now_s = time.monotonic()
    if now_s - _current.progress_s < interval_s:
        return False
    _current.progress_s = now_s
    return True


def sample_devices(device_memory: DeviceMemory) -> None:
    """Adds the memory of devices to the samples of this process."""
    if _current.sampler is not None:
        _current.sampler.device_memory = device_memory


def close_events(exit_code: int, reason: str | None = None) -> None:
    """Records that this process exits, and closes its events; call it before `os._exit`.

    Args:
        exit_code: exit code of the process.
        reason: why it exits, or None.
    """
    if _current.writer is not None:
        if _current.sampler is not None:
            _current.sampler.stop()
        _current.writer.end(exit_code, reason)
        _current.writer.close()


def _new_waits() -> StepWaits:
    """Returns the waits since the last call, for what the clock sees of a custom loop.

    Only the sums of an elastic group are counted in full; elsewhere a loop may wait for a device
    where nothing is counted.
    """
    before, now = _current.waits, wait_clock.read()
    _current.waits = now
    if before is None:
        return StepWaits()
    waits = wait_clock.since(before)
    return waits if wait_clock.measures_transfers else StepWaits(input_s=waits.input_s)


def _open_writer(run_dir: str) -> EventWriter:
    task_type, index, count = "worker", 0, 1
    if (resolver := detect()) is not None:
        task_type, index = resolver.task_type or "worker", resolver.task_id or 0
        # A parameter server is not part of the training group.
        count = 1 if task_type == "ps" else resolver.processes().num_processes
    return EventWriter(run_dir, task_type, index, num_processes=count, age_s=_age_s())


def _age_s() -> float:
    """Returns the age of this process in seconds, or 0 if unknown."""
    try:
        # The process name is in parentheses and may contain spaces.
        fields = _STAT.read_text(errors="replace").rpartition(")")[2].split()
        started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started_s)
    except (AttributeError, IndexError, OSError, ValueError):
        return 0.0


def _watch_exceptions() -> None:
    """Records an uncaught exception as the exit reason; the code of `sys.exit` is not visible."""
    previous = sys.excepthook

    def note(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        _current.exit_code = INTERRUPTED if issubclass(kind, KeyboardInterrupt) else 1
        _current.reason = f"{kind.__name__}: {error}"
        previous(kind, error, trace)

    sys.excepthook = note


@atexit.register
def _close_at_exit() -> None:
    # Registered before the exit handlers that record events, so that it runs after them.
    close_events(_current.exit_code, _current.reason)
