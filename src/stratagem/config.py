"""Library-wide settings such as `sg.config.run_eagerly`, initialized from environment variables."""

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


class _ThreadSettings(threading.local):
    """Settings of one thread, so that debugging in one thread does not affect another."""

    def __init__(self) -> None:
        self.run_eagerly: bool = environment.read("run_eagerly")


_settings = _ThreadSettings()


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
    _settings.run_eagerly = _as_bool(enabled)


def runs_eagerly() -> bool:
    """Returns True if replica functions run eagerly in this thread.

    Returns:
        The value last passed to `run_eagerly`, or `STRATAGEM_RUN_EAGERLY` by default.

    Example:
        >>> sg.config.runs_eagerly()
        False

    Source: TF 2.21 tf.config.functions_run_eagerly.
    """
    return _settings.run_eagerly


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
        The value last passed to `filter_tracebacks`, or `STRATAGEM_TRACEBACK_FILTERING` by default.

    Example:
        >>> sg.config.filters_tracebacks()
        True

    Source: specific to Stratagem.
    """
    chosen = _TracebackSettings.are_filtered
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
    """Returns the number of compiled replica functions that a strategy caches.

    Returns:
        The value of `STRATAGEM_PROGRAM_CACHE_SIZE`; the least recently used are evicted first.

    Example:
        >>> sg.config.program_cache_size()
        256

    Source: specific to Stratagem.
    """
    return environment.read("program_cache_size")


def cache_dir() -> Path:
    """Returns the folder for measurements that are cached for later runs.

    Returns:
        The value of `STRATAGEM_CACHE_DIR`, with `~` expanded. It may not exist.

    Example:
        >>> from unittest import mock
        >>> with mock.patch.dict("os.environ", STRATAGEM_CACHE_DIR="/var/cache/stratagem"):
        ...     print(sg.config.cache_dir())
        /var/cache/stratagem

    Source: specific to Stratagem.
    """
    return Path(environment.read("cache_dir")).expanduser()


def join_timeout_s() -> float:
    """Returns how long the processes of a cluster wait for each other at startup, in seconds.

    Returns:
        The value of `STRATAGEM_JOIN_TIMEOUT_S`.

    Example:
        >>> from unittest import mock
        >>> with mock.patch.dict("os.environ", STRATAGEM_JOIN_TIMEOUT_S="900"):
        ...     sg.config.join_timeout_s()
        900.0

    Source: specific to Stratagem.
    """
    return environment.read("join_timeout_s")


def peer_timeout_s() -> float:
    """Returns how long a process may be silent before it counts as lost, in seconds.

    Returns:
        The value of `STRATAGEM_PEER_TIMEOUT_S`.

    Example:
        >>> from unittest import mock
        >>> with mock.patch.dict("os.environ", STRATAGEM_PEER_TIMEOUT_S="5"):
        ...     sg.config.peer_timeout_s()
        5.0

    Source: specific to Stratagem.
    """
    return environment.read("peer_timeout_s")


def stuck_timeout_s() -> float:
    """Returns how long a process may make no progress while others wait for it, in seconds.

    Returns:
        The value of `STRATAGEM_STUCK_TIMEOUT_S`.

    Example:
        >>> from unittest import mock
        >>> with mock.patch.dict("os.environ", STRATAGEM_STUCK_TIMEOUT_S="600"):
        ...     sg.config.stuck_timeout_s()
        600.0

    Source: specific to Stratagem.
    """
    return environment.read("stuck_timeout_s")


def barrier_timeout_s() -> float:
    """Returns how long processes wait for each other at a barrier, in seconds.

    Returns:
        The value of `STRATAGEM_BARRIER_TIMEOUT_S`.

    Example:
        >>> from unittest import mock
        >>> with mock.patch.dict("os.environ", STRATAGEM_BARRIER_TIMEOUT_S="60"):
        ...     sg.config.barrier_timeout_s()
        60.0

    Source: specific to Stratagem.
    """
    return environment.read("barrier_timeout_s")


def checkpoint_timeout_s() -> float:
    """Returns how long an evaluator waits for the next checkpoint, in seconds.

    Returns:
        The value of `STRATAGEM_CHECKPOINT_TIMEOUT_S`.

    Example:
        >>> from unittest import mock
        >>> with mock.patch.dict("os.environ", STRATAGEM_CHECKPOINT_TIMEOUT_S="3600"):
        ...     sg.config.checkpoint_timeout_s()
        3600.0

    Source: specific to Stratagem.
    """
    return environment.read("checkpoint_timeout_s")
