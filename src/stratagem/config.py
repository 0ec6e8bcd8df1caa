"""Settings that a program can change: eager mode, tracebacks and logs."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import ParamSpec, TypeVar

from stratagem import logs, settings
from stratagem.errors import check_type

__all__ = [
    "filter_tracebacks",
    "log_level",
    "run_eagerly",
    "runs_eagerly",
    "show_logs",
]


class _ThreadSettings(threading.local):
    """Settings of one thread, so that debugging in one thread does not affect another."""

    def __init__(self) -> None:
        self.run_eagerly: bool = settings.read("run_eagerly")


_of_thread = _ThreadSettings()


def run_eagerly(enabled: bool) -> None:
    """Runs replica functions eagerly, op by op with one thread per replica, or compiled.

    Results are the same. Eager functions can be debugged step by step, and print real values.

    Args:
        enabled: True for eager, False for compiled (the default).

    Raises:
        TypeError: `enabled` is not a bool.

    Example:
        >>> sg.config.run_eagerly(True)
        >>> sg.config.runs_eagerly()
        True
        >>> sg.config.run_eagerly(False)

    Source: TF 2.21 tf.config.run_functions_eagerly.
    """
    _of_thread.run_eagerly = _as_bool(enabled)


def runs_eagerly() -> bool:
    """Returns True if replica functions run eagerly in this thread.

    Returns:
        The value last passed to `run_eagerly`, or `STRATAGEM_RUN_EAGERLY` by default.

    Example:
        >>> sg.config.runs_eagerly()
        False

    Source: TF 2.21 tf.config.functions_run_eagerly.
    """
    return _of_thread.run_eagerly


class _TracebackSettings:
    """The setting of this process; a step may run in any of its threads."""

    are_filtered: bool | None = None


def filter_tracebacks(enabled: bool) -> None:
    """Shows or hides frames of this library in tracebacks; hidden by default.

    Args:
        enabled: False to show them, for debugging the library itself.

    Raises:
        TypeError: `enabled` is not a bool.

    Example:
        >>> sg.config.filter_tracebacks(False)
        >>> sg.config.filters_tracebacks()
        False
        >>> sg.config.filter_tracebacks(True)

    Source: JAX, jax_traceback_filtering.
    """
    _TracebackSettings.are_filtered = _as_bool(enabled)


def filters_tracebacks() -> bool:
    """Returns True if frames of this library are hidden in tracebacks.

    Returns:
        The value last passed to `filter_tracebacks`, or `STRATAGEM_FILTER_TRACEBACKS` by default.

    Example:
        >>> sg.config.filters_tracebacks()
        True

    Source: specific to Stratagem.
    """
    chosen = _TracebackSettings.are_filtered
    return settings.read("filter_tracebacks") if chosen is None else chosen


def _as_bool(enabled: bool) -> bool:
    check_type("enabled", enabled, bool, "True or False")
    return enabled


def show_logs(log_level: str | None = None, log_format: str | None = None) -> None:
    """Chooses the log records of this library that this process shows on stderr.

    A program with logging handlers of its own gets the records of this level there.

    Args:
        log_level: "debug", "info", "warning" or "error"; "auto" for INFO on the leader of a cluster
            and WARNING elsewhere; None for the current one.
        log_format: "text", or "json" for one object per line; None for the current one.

    Raises:
        ValueError: another word.

    Example:
        >>> sg.config.show_logs("info")
        >>> sg.config.log_level()
        'info'
        >>> sg.config.show_logs("auto")

    Source: TF 2.21 tf.get_logger, tf.compat.v1.logging.set_verbosity.
    """
    logs.show_logs(log_level, log_format)


def log_level() -> str:
    """Returns the lowest level of log records that this process shows.

    Returns:
        The word last passed to `show_logs`, or `STRATAGEM_LOG_LEVEL` by default.

    Example:
        >>> sg.config.log_level()
        'auto'

    Source: specific to Stratagem.
    """
    return logs.log_level()


def log_format() -> str:
    """Returns the format of log records on stderr.

    Returns:
        The word last passed to `show_logs`, or `STRATAGEM_LOG_FORMAT` by default.

    Example:
        >>> sg.config.log_format()
        'text'

    Source: specific to Stratagem.
    """
    return logs.log_format()


# Traceback filtering: frames of this library are hidden, so that user code stands out.

_P = ParamSpec("_P")
_R = TypeVar("_R")
_FOLDER = str(Path(__file__).parent)
_NOTE = (
    "Frames of stratagem are hidden. sg.config.filter_tracebacks(False) or "
    "STRATAGEM_FILTER_TRACEBACKS=0 shows them."
)


def filters_traceback(fn: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorates a public function so that its errors' tracebacks hide this library's frames."""

    @functools.wraps(fn)
    def filtered(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        # Only a bare re-raise, as in `with`, does not add this frame to the traceback again.
        with _TracebackFilter():
            return fn(*args, **kwargs)

    return filtered


class _TracebackFilter:
    """Removes this library's frames from the traceback of a passing error."""

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        if error is None or not filters_tracebacks():
            return
        entries: list[TracebackType] = []
        entry = error.__traceback__
        while entry is not None:
            entries.append(entry)
            entry = entry.tb_next
        if _is_ours(entries[-1]) and _NOTE not in getattr(error, "__notes__", ()):
            error.add_note(_NOTE)
        shown: TracebackType | None = None
        for entry in reversed(entries):
            if not _is_ours(entry):
                shown = TracebackType(shown, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
        error.__traceback__ = shown


def _is_ours(entry: TracebackType) -> bool:
    return entry.tb_frame.f_code.co_filename.startswith(_FOLDER)
