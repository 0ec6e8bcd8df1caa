"""The events of this process, in a run that has a folder for them."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from pathlib import Path
from types import TracebackType

from stratagem import environment
from stratagem.cluster import detect
from stratagem.goodput.writer import EventWriter

__all__ = ["close_events", "current_events", "step"]

_STAT = Path("/proc/self/stat")
_INTERRUPTED = 130  # as shells tell it


class _Current:
    writer: EventWriter | None = None
    exit_code: int = 0
    reason: str | None = None


_current = _Current()
_lock = threading.Lock()


def current_events() -> EventWriter | None:
    """Returns where this process writes what it does.

    It is opened by the first call, as the task that `sg.cluster.detect()` finds, and closed when
    the process ends. A forked child writes nothing.

    Returns:
        The writer; None without `STRATAGEM_RUN_DIR`.

    Raises:
        ValueError: the environment describes a cluster that cannot be.

    Example:
        >>> sg.goodput.current_events() is None  # without STRATAGEM_RUN_DIR
        True
    """
    if _current.writer is None:
        run_dir = environment.lookup("STRATAGEM_RUN_DIR")
        if run_dir is None:
            return None
        with _lock:
            if _current.writer is None:
                _current.writer = _open(run_dir)
                _watch_exceptions()
    return _current.writer


def step(step: int, *, num_steps: int = 1, duration_s: float | None = None) -> None:
    """Tells that a loop of your own has done a step or several, just now; `fit` does so itself.

    Without `STRATAGEM_RUN_DIR` it does nothing.

    Args:
        step: how many steps of the run are done; it goes on through restarts.
        num_steps: how many of them the last call has done.
        duration_s: how long that call took; without it, the time since the step before.

    Raises:
        ValueError: no step, more steps than were done, or a negative duration.

    Example:
        >>> for step in range(1, 101):
        ...     sg.goodput.step(step)
    """
    events = current_events()
    if events is not None:
        events.step(step, num_steps=num_steps, duration_s=duration_s)


def close_events(exit_code: int, reason: str | None = None) -> None:
    """Tells that this process ends, and closes its events; whoever ends it at once calls this.

    Args:
        exit_code: what it ends with.
        reason: why.
    """
    if _current.writer is not None:
        _current.writer.end(exit_code, reason)
        _current.writer.close()


def _open(run_dir: str) -> EventWriter:
    resolver = detect()
    if resolver is None:
        return EventWriter(run_dir, "worker", 0, num_processes=1, age_s=_age_s())
    task_type = resolver.task_type or "worker"
    # A parameter server trains with nobody.
    num_processes = 1 if task_type == "ps" else resolver.processes().num_processes
    return EventWriter(
        run_dir,
        task_type,
        resolver.task_id or 0,
        num_processes=num_processes,
        age_s=_age_s(),
    )


def _age_s() -> float:
    """How long this process has run, where the system tells: its start is not its first event."""
    try:
        # The name stands in parentheses and may hold anything.
        fields = _STAT.read_text(errors="replace").rpartition(")")[2].split()
        started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started_s)
    except (AttributeError, IndexError, OSError, ValueError):
        return 0.0


def _watch_exceptions() -> None:
    """Notes an error that ends the process; what `sys.exit` was given nobody can find out."""
    previous = sys.excepthook

    def note(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        _current.exit_code = _INTERRUPTED if issubclass(kind, KeyboardInterrupt) else 1
        _current.reason = f"{kind.__name__}: {error}"
        previous(kind, error, trace)

    sys.excepthook = note


@atexit.register
def _close() -> None:
    # Registered before those of all who tell events, so that it runs after them.
    close_events(_current.exit_code, _current.reason)
