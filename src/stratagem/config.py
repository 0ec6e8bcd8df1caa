"""Library-wide settings such as `sg.config.run_eagerly`, initialized from environment variables."""

from __future__ import annotations

import threading
from pathlib import Path

from stratagem import environment, logs
from stratagem.messages import explain
from stratagem.security_settings import (
    allow_unauthenticated,
    max_handshakes,
    max_handshakes_per_address,
    secret_file,
    tls_dir,
)
from stratagem.service_settings import input_service, jobs_port, upload_limit_bytes
from stratagem.time_limits import (
    barrier_timeout_s,
    checkpoint_timeout_s,
    client_timeout_s,
    handshake_timeout_s,
    join_timeout_s,
    peer_timeout_s,
    pod_grace_s,
    save_timeout_s,
    stuck_timeout_s,
)

__all__ = [
    "allow_unauthenticated",
    "barrier_timeout_s",
    "cache_dir",
    "checkpoint_timeout_s",
    "client_timeout_s",
    "compilation_cache_bytes",
    "fast_convolutions",
    "filter_tracebacks",
    "filters_tracebacks",
    "foreign_lines",
    "handshake_timeout_s",
    "input_service",
    "jobs_port",
    "join_timeout_s",
    "keep_freed_memory",
    "log_format",
    "log_level",
    "max_handshakes",
    "max_handshakes_per_address",
    "num_spares",
    "peer_timeout_s",
    "pod_grace_s",
    "program_cache_size",
    "run_eagerly",
    "runs_eagerly",
    "save_timeout_s",
    "secret_file",
    "show_logs",
    "stuck_timeout_s",
    "tls_dir",
    "tpu_platform",
    "upload_limit_bytes",
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
        The value last passed to `filter_tracebacks`, or `STRATAGEM_FILTER_TRACEBACKS` by default.

    Example:
        >>> sg.config.filters_tracebacks()
        True

    Source: specific to Stratagem.
    """
    chosen = _TracebackSettings.are_filtered
    return environment.read("filter_tracebacks") if chosen is None else chosen


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


def keep_freed_memory() -> bool:
    """Returns True if memory that a step on CPU devices has freed is kept for the next step.

    It is read when the library is imported, and has no effect on hosts with accelerators.

    Returns:
        The value of `STRATAGEM_KEEP_FREED_MEMORY`.

    Example:
        >>> sg.config.keep_freed_memory()
        True

    Source: mallopt(3), M_TRIM_THRESHOLD.
    """
    return environment.read("keep_freed_memory")


def fast_convolutions() -> bool:
    """Returns True if convolutions on CPU devices are computed in the form that is fastest there.

    It is read when a step is compiled. Results agree with the plain form up to rounding.

    Returns:
        The value of `STRATAGEM_FAST_CONVOLUTIONS`.

    Example:
        >>> sg.config.fast_convolutions()
        True

    Source: specific to Stratagem.
    """
    return environment.read("fast_convolutions")


def cache_dir() -> Path:
    """Returns the folder for measurements and compiled programs that are cached for later runs.

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


def compilation_cache_bytes() -> int:
    """Returns the maximum size of the compiled programs in the cache folder.

    The programs used least recently are removed when a process creates its first strategy.

    Returns:
        The value of `STRATAGEM_COMPILATION_CACHE_BYTES`, in bytes; 0 stores no programs.

    Example:
        >>> sg.config.compilation_cache_bytes() // 2**30
        2

    Source: JAX, jax_compilation_cache_max_size.
    """
    return environment.read("compilation_cache_bytes")


def num_spares() -> int:
    """Returns how many of the last processes of an `ElasticStrategy` wait to replace lost ones.

    Returns:
        The value of `STRATAGEM_NUM_SPARES`, which `stratagem launch --spares` sets.

    Example:
        >>> from unittest import mock
        >>> with mock.patch.dict("os.environ", STRATAGEM_NUM_SPARES="1"):
        ...     sg.config.num_spares()
        1

    Source: specific to Stratagem.
    """
    return environment.read("num_spares")


def tpu_platform() -> str:
    """Returns the platform of `TPUStrategy`.

    Returns:
        The value of `STRATAGEM_TPU_PLATFORM`: "tpu", or "cpu" to try a program.

    Example:
        >>> from unittest import mock
        >>> with mock.patch.dict("os.environ", STRATAGEM_TPU_PLATFORM="cpu"):
        ...     sg.config.tpu_platform()
        'cpu'

    Source: specific to Stratagem.
    """
    return environment.read("tpu_platform")


def foreign_lines() -> bool:
    """Returns True if log lines of Gloo and of JAX's coordination service are shown.

    Returns:
        The value of `STRATAGEM_FOREIGN_LINES`.

    Example:
        >>> from unittest import mock
        >>> with mock.patch.dict("os.environ", STRATAGEM_FOREIGN_LINES="1"):
        ...     sg.config.foreign_lines()
        True

    Source: specific to Stratagem.
    """
    return environment.read("foreign_lines")


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
