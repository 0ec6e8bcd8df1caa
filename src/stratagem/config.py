"""Library-wide settings: `sg.config.run_eagerly(True)` and the like.

Each starts from one environment variable (`environment.VARIABLES`) and can be changed here.
"""

from __future__ import annotations

import threading
from pathlib import Path

from stratagem import environment
from stratagem.messages import explain

__all__ = [
    "barrier_timeout_s",
    "cache_dir",
    "checkpoint_timeout_s",
    "filter_tracebacks",
    "filters_tracebacks",
    "join_timeout_s",
    "peer_timeout_s",
    "program_cache_size",
    "run_eagerly",
    "runs_eagerly",
    "stuck_timeout_s",
]


class _Settings(threading.local):
    """Settings of one thread, so that a debugging session does not change another thread's."""

    def __init__(self) -> None:
        self.run_eagerly: bool = environment.read("run_eagerly")


_settings = _Settings()


def run_eagerly(enabled: bool) -> None:
    """Chooses between compiled replica functions and op-by-op ones with a thread a replica.

    Both give the same numbers; eager ones can be stepped through and print real values.

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
    _settings.run_eagerly = _as_bool(enabled)


def runs_eagerly() -> bool:
    """Tells whether replica functions run op by op in this thread.

    Returns:
        The value last given to `run_eagerly`, else that of `STRATAGEM_RUN_EAGERLY`.
    """
    return _settings.run_eagerly


class _Tracebacks:
    """The setting of this process; a step may run in any of its threads."""

    are_filtered: bool | None = None


def filter_tracebacks(enabled: bool) -> None:
    """Chooses whether frames of this library are left out of tracebacks, as they are by default.

    Args:
        enabled: False to see them, for debugging the library itself.

    Raises:
        TypeError: `enabled` is not a bool.

    Example:
        >>> sg.config.filter_tracebacks(False)
        >>> sg.config.filters_tracebacks()
        False
        >>> sg.config.filter_tracebacks(True)

    Source: JAX, jax_traceback_filtering.
    """
    _Tracebacks.are_filtered = _as_bool(enabled)


def filters_tracebacks() -> bool:
    """Tells whether frames of this library are left out of tracebacks.

    Returns:
        The value last given to `filter_tracebacks`, else that of `STRATAGEM_TRACEBACK_FILTERING`.
    """
    chosen = _Tracebacks.are_filtered
    return environment.read("traceback_filtering") if chosen is None else chosen


def _as_bool(enabled: object) -> bool:
    if not isinstance(enabled, bool):
        raise TypeError(
            explain(
                f"enabled={enabled!r} is of type {type(enabled).__name__}.",
                expected="True or False.",
                fix="pass a bool.",
            )
        )
    return enabled


def program_cache_size() -> int:
    """Returns how many compiled replica functions a strategy keeps.

    Returns:
        The value of `STRATAGEM_PROGRAM_CACHE_SIZE`; the least recently used go first.
    """
    return environment.read("program_cache_size")


def cache_dir() -> Path:
    """Returns the folder for what is measured once and kept for later runs.

    Returns:
        The value of `STRATAGEM_CACHE_DIR`, with `~` for the home folder. It need not exist.
    """
    return Path(environment.read("cache_dir")).expanduser()


def join_timeout_s() -> float:
    """Returns how long the processes of a cluster wait for one another at the start, in seconds.

    Returns:
        The value of `STRATAGEM_JOIN_TIMEOUT_S`.
    """
    return environment.read("join_timeout_s")


def peer_timeout_s() -> float:
    """Returns how long a process may give no sign of life, in seconds.

    Returns:
        The value of `STRATAGEM_PEER_TIMEOUT_S`.
    """
    return environment.read("peer_timeout_s")


def stuck_timeout_s() -> float:
    """Returns how long a process may make no progress while others wait for it, in seconds.

    Returns:
        The value of `STRATAGEM_STUCK_TIMEOUT_S`.
    """
    return environment.read("stuck_timeout_s")


def barrier_timeout_s() -> float:
    """Returns how long processes wait for one another at one place, in seconds.

    Returns:
        The value of `STRATAGEM_BARRIER_TIMEOUT_S`.
    """
    return environment.read("barrier_timeout_s")


def checkpoint_timeout_s() -> float:
    """Returns how long an evaluator waits for the next checkpoint, in seconds.

    Returns:
        The value of `STRATAGEM_CHECKPOINT_TIMEOUT_S`.
    """
    return environment.read("checkpoint_timeout_s")
