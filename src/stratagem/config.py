"""Library-wide settings such as `sg.config.run_eagerly`, initialized from environment variables."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import ParamSpec, TypeVar

from stratagem import environment, logs
from stratagem.errors import explain

# Time limits from environment variables, in seconds; public as functions of `sg.config`.

__all__ = [
    "barrier_timeout_s",
    "checkpoint_timeout_s",
    "client_timeout_s",
    "handshake_timeout_s",
    "join_timeout_s",
    "peer_timeout_s",
    "pod_grace_s",
    "save_timeout_s",
    "stuck_timeout_s",
]


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


def client_timeout_s() -> float:
    """Returns how long a job that ends with its client runs while the client is silent.

    Returns:
        The value of `STRATAGEM_CLIENT_TIMEOUT_S`.

    Example:
        >>> from unittest import mock
        >>> with mock.patch.dict("os.environ", STRATAGEM_CLIENT_TIMEOUT_S="20"):
        ...     sg.config.client_timeout_s()
        20.0

    Source: specific to Stratagem.
    """
    return environment.read("client_timeout_s")


def handshake_timeout_s() -> float:
    """Returns how long a new connection may take to prove the secret of the run.

    Returns:
        The value of `STRATAGEM_HANDSHAKE_TIMEOUT_S`.

    Example:
        >>> from unittest import mock
        >>> with mock.patch.dict("os.environ", STRATAGEM_HANDSHAKE_TIMEOUT_S="30"):
        ...     sg.config.handshake_timeout_s()
        30.0

    Source: specific to Stratagem.
    """
    return environment.read("handshake_timeout_s")


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


def pod_grace_s() -> float:
    """Returns the seconds that Kubernetes gives a pod from SIGTERM to SIGKILL.

    Returns:
        The value of `STRATAGEM_POD_GRACE_S`.

    Example:
        >>> from unittest import mock
        >>> with mock.patch.dict("os.environ", STRATAGEM_POD_GRACE_S="60"):
        ...     sg.config.pod_grace_s()
        60.0

    Source: specific to Stratagem.
    """
    return environment.read("pod_grace_s")


def save_timeout_s() -> float:
    """Returns how long processes wait for another to read or write a checkpoint.

    Returns:
        The value of `STRATAGEM_SAVE_TIMEOUT_S`.

    Example:
        >>> from unittest import mock
        >>> with mock.patch.dict("os.environ", STRATAGEM_SAVE_TIMEOUT_S="600"):
        ...     sg.config.save_timeout_s()
        600.0

    Source: specific to Stratagem.
    """
    return environment.read("save_timeout_s")


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


# Settings of authentication and encryption, from environment variables; public in `sg.config`.

__all__ = [
    "allow_unauthenticated",
    "max_handshakes",
    "max_handshakes_per_address",
    "secret_file",
    "tls_dir",
]


def allow_unauthenticated() -> bool:
    """Returns True if a run on several hosts may do without a secret.

    Returns:
        The value of `STRATAGEM_ALLOW_UNAUTHENTICATED`.

    Example:
        >>> from unittest import mock
        >>> with mock.patch.dict("os.environ", STRATAGEM_ALLOW_UNAUTHENTICATED="1"):
        ...     sg.config.allow_unauthenticated()
        True

    Source: specific to Stratagem.
    """
    return environment.read("allow_unauthenticated")


def max_handshakes() -> int:
    """Returns how many connections of a port may prove the secret at the same time.

    Returns:
        The value of `STRATAGEM_MAX_HANDSHAKES`.

    Example:
        >>> from unittest import mock
        >>> with mock.patch.dict("os.environ", STRATAGEM_MAX_HANDSHAKES="512"):
        ...     sg.config.max_handshakes()
        512

    Source: specific to Stratagem.
    """
    return environment.read("max_handshakes")


def max_handshakes_per_address() -> int:
    """Returns how many connections from one address may prove the secret at the same time.

    Returns:
        The value of `STRATAGEM_MAX_HANDSHAKES_PER_ADDRESS`.

    Example:
        >>> from unittest import mock
        >>> with mock.patch.dict("os.environ", STRATAGEM_MAX_HANDSHAKES_PER_ADDRESS="128"):
        ...     sg.config.max_handshakes_per_address()
        128

    Source: specific to Stratagem.
    """
    return environment.read("max_handshakes_per_address")


def secret_file() -> str:
    """Returns the name of the file with the secret of the run.

    Returns:
        The value of `STRATAGEM_SECRET_FILE`; "" for none.

    Example:
        >>> from unittest import mock
        >>> with mock.patch.dict("os.environ", STRATAGEM_SECRET_FILE="~/run.secret"):
        ...     sg.config.secret_file()
        '~/run.secret'

    Source: specific to Stratagem.
    """
    return environment.read("secret_file")


def tls_dir() -> str:
    """Returns the folder with the certificate of this process and its authority.

    Returns:
        The value of `STRATAGEM_TLS_DIR`; "" for none.

    Example:
        >>> from unittest import mock
        >>> with mock.patch.dict("os.environ", STRATAGEM_TLS_DIR="/etc/tls"):
        ...     sg.config.tls_dir()
        '/etc/tls'

    Source: specific to Stratagem.
    """
    return environment.read("tls_dir")


# Settings of services: the input service, and the server of jobs.

__all__ = ["input_service", "jobs_port", "upload_limit_bytes"]


def input_service() -> str:
    """Returns the address of the input service of this run.

    Returns:
        The value of `STRATAGEM_INPUT_SERVICE`, which `stratagem launch --input-workers` sets; ""
        for none.

    Example:
        >>> from unittest import mock
        >>> with mock.patch.dict("os.environ", STRATAGEM_INPUT_SERVICE="10.0.0.1:5050"):
        ...     sg.config.input_service()
        '10.0.0.1:5050'

    Source: specific to Stratagem.
    """
    return environment.read("input_service")


def jobs_port() -> int:
    """Returns the port on which the leader's server accepts jobs of clients.

    Returns:
        The value of `STRATAGEM_JOBS_PORT`.

    Example:
        >>> from unittest import mock
        >>> with mock.patch.dict("os.environ", STRATAGEM_JOBS_PORT="9000"):
        ...     sg.config.jobs_port()
        9000

    Source: specific to Stratagem.
    """
    return environment.read("jobs_port")


def upload_limit_bytes() -> int:
    """Returns the maximum size of the files that a client sends with its program.

    Returns:
        The value of `STRATAGEM_UPLOAD_LIMIT_BYTES`.

    Example:
        >>> from unittest import mock
        >>> with mock.patch.dict("os.environ", STRATAGEM_UPLOAD_LIMIT_BYTES="1000000"):
        ...     sg.config.upload_limit_bytes()
        1000000

    Source: specific to Stratagem.
    """
    return environment.read("upload_limit_bytes")


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
