"""The only place that reads or writes the process's environment variables."""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from stratagem.messages import explain

__all__ = [
    "VARIABLES",
    "Variable",
    "lookup",
    "note_what_was_read",
    "num_forced_cpu_devices",
    "path_with_this_python",
    "read",
    "replace",
    "require_jax_backend",
    "require_what_was_read",
    "select_keras_backend",
    "set_defaults",
    "show_gpus",
    "size_cpu_thread_pool",
    "snapshot",
    "visible_gpus",
]

# XLA:CPU needs this many threads a virtual device: with fewer, JAX up to 0.11.2 can deadlock in a
# collective, because every thread of the pool waits for a peer that has no thread to run on.
_POOL_THREADS_PER_DEVICE = 4

# What show_gpus has last written, and what stood there before: dealing out a second time must start
# from all GPUs again, and not from this process's share of them.
_shown_gpus: dict[str, str | None] = {}

# Of other libraries, that are read when they are loaded.
_SETTINGS = ("JAX_", "KERAS_")
_read_settings: list[dict[str, str]] = []


def _parse_bool(text: str) -> bool:
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("", "0", "false", "no", "off"):
        return False
    raise ValueError(
        explain(
            f"{text!r} is not a truth value.",
            expected="1, true, yes, on, or 0, false, no, off.",
            fix="correct or unset the environment variable.",
        )
    )


def _parse_count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(
            explain(
                f"{text!r} is not a count.",
                expected="a whole number of at least 1.",
                fix="correct or unset the environment variable.",
            )
        )
    return int(text)


def _parse_seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ValueError(
            explain(
                f"{text!r} is not a time limit.",
                expected="a number of seconds above 0.",
                fix="correct or unset the environment variable.",
            )
        )
    return value


def _parse_tpu_platform(text: str) -> str:
    if text not in ("tpu", "cpu"):
        raise ValueError(
            explain(
                f"{text!r} is no platform that can stand for TPUs.",
                expected='"tpu", or "cpu" to try a program for TPUs on this machine.',
                fix="correct or unset the environment variable.",
            )
        )
    return text


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variable:
    """One environment variable that sets a default.

    Args:
        name: its full name.
        default: the value when it is not set.
        parse: turns its text into a value.
        meaning: one line for the documentation.
    """

    name: str
    default: Any
    parse: Callable[[str], Any]
    meaning: str


VARIABLES = {
    "run_eagerly": Variable(
        name="STRATAGEM_RUN_EAGERLY",
        default=False,
        parse=_parse_bool,
        meaning="Run replica functions op by op, one thread a replica, for debugging.",
    ),
    "traceback_filtering": Variable(
        name="STRATAGEM_TRACEBACK_FILTERING",
        default=True,
        parse=_parse_bool,
        meaning="Leave frames of this library out of tracebacks.",
    ),
    "foreign_lines": Variable(
        name="STRATAGEM_FOREIGN_LINES",
        default=False,
        parse=_parse_bool,
        meaning="Show lines of Gloo and of JAX's coordination service, for debugging.",
    ),
    "program_cache_size": Variable(
        name="STRATAGEM_PROGRAM_CACHE_SIZE",
        default=256,
        parse=_parse_count,
        meaning="How many compiled replica functions a strategy keeps.",
    ),
    "cache_dir": Variable(
        name="STRATAGEM_CACHE_DIR",
        default="~/.cache/stratagem",
        parse=str,
        meaning="Folder for what is measured once and kept for later runs.",
    ),
    "join_timeout_s": Variable(
        name="STRATAGEM_JOIN_TIMEOUT_S",
        default=300.0,
        parse=_parse_seconds,
        meaning="How long the processes of a cluster wait for one another at the start.",
    ),
    "peer_timeout_s": Variable(
        name="STRATAGEM_PEER_TIMEOUT_S",
        default=30.0,
        parse=_parse_seconds,
        meaning="How long a process may give no sign of life before the others give up.",
    ),
    "stuck_timeout_s": Variable(
        name="STRATAGEM_STUCK_TIMEOUT_S",
        default=120.0,
        parse=_parse_seconds,
        meaning="How long a living process may make no progress while others wait for it.",
    ),
    "barrier_timeout_s": Variable(
        name="STRATAGEM_BARRIER_TIMEOUT_S",
        default=300.0,
        parse=_parse_seconds,
        meaning="How long processes wait for one another to arrive at one place.",
    ),
    "checkpoint_timeout_s": Variable(
        name="STRATAGEM_CHECKPOINT_TIMEOUT_S",
        default=3600.0,
        parse=_parse_seconds,
        meaning="How long an evaluator waits for the next checkpoint.",
    ),
    "save_timeout_s": Variable(
        name="STRATAGEM_SAVE_TIMEOUT_S",
        default=1800.0,
        parse=_parse_seconds,
        meaning="How long processes wait for one that reads or writes a checkpoint.",
    ),
    "client_timeout_s": Variable(
        name="STRATAGEM_CLIENT_TIMEOUT_S",
        default=60.0,
        parse=_parse_seconds,
        meaning="How long a job goes on whose client gives no sign of life, if it ends with it.",
    ),
    "jobs_port": Variable(
        name="STRATAGEM_JOBS_PORT",
        default=8265,
        parse=_parse_count,
        meaning="The port at which the leader's server takes jobs of clients.",
    ),
    "upload_limit_bytes": Variable(
        name="STRATAGEM_UPLOAD_LIMIT_BYTES",
        default=100 * 2**20,
        parse=_parse_count,
        meaning="How large the files may be that a client sends with its program.",
    ),
    "pod_grace_s": Variable(
        name="STRATAGEM_POD_GRACE_S",
        default=30.0,
        parse=_parse_seconds,
        meaning="The pod's `terminationGracePeriodSeconds`: the time from SIGTERM to its end.",
    ),
    "tpu_platform": Variable(
        name="STRATAGEM_TPU_PLATFORM",
        default="tpu",
        parse=_parse_tpu_platform,
        meaning="With `cpu` CPU devices stand for the chips of a TPU, to try a program.",
    ),
}


def read(setting: str) -> Any:
    """Returns the value of a setting from the environment, or its default.

    Args:
        setting: a key of `VARIABLES`.

    Returns:
        The parsed value.

    Raises:
        ValueError: the text in the environment is no such value.
    """
    variable = VARIABLES[setting]
    text = os.environ.get(variable.name)
    if text is None:
        return variable.default
    try:
        return variable.parse(text)
    except ValueError as error:
        raise ValueError(f"Environment variable {variable.name}: {error}") from error


def select_keras_backend() -> None:
    """Makes Keras use JAX, unless the user has chosen a backend.

    Raises:
        ImportError: Keras is already loaded with another backend, which cannot be changed.
    """
    keras = sys.modules.get("keras")
    if keras is not None and hasattr(keras, "config"):
        require_jax_backend(keras.config.backend())
    if not os.environ.get("KERAS_BACKEND"):  # Keras takes an empty one for none
        os.environ["KERAS_BACKEND"] = "jax"


def require_jax_backend(backend: str) -> None:
    """Raises unless Keras runs on JAX.

    Args:
        backend: the backend that Keras was loaded with.

    Raises:
        ImportError: another one, which cannot be changed once Keras is loaded.
    """
    if backend != "jax":
        raise ImportError(
            explain(
                f"Keras runs on the {backend!r} backend.",
                expected="the 'jax' backend, which cannot be changed once Keras is loaded.",
                fix="put `import stratagem` before `import keras`, or set KERAS_BACKEND=jax.",
            )
        )


def require_jax_choice() -> None:
    """Raises where Keras, not loaded yet, is going to be loaded with another backend.

    Raises:
        ImportError: `KERAS_BACKEND` names one. Keras would fail where that one is not installed.
    """
    chosen = os.environ.get("KERAS_BACKEND")
    if chosen and chosen != "jax" and "keras" not in sys.modules:
        raise ImportError(
            explain(
                f"KERAS_BACKEND is {chosen!r}.",
                expected="'jax', or no choice at all: stratagem then makes it.",
                fix="unset KERAS_BACKEND, or set KERAS_BACKEND=jax.",
            )
        )


def num_forced_cpu_devices() -> int:
    """Returns how many CPU devices `XLA_FLAGS` asks for.

    Returns:
        The number in `--xla_force_host_platform_device_count`; 1 without it.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    counts = re.findall(r"--xla_force_host_platform_device_count=(\d+)", flags)
    return int(counts[-1]) if counts else 1


def size_cpu_thread_pool(num_devices: int) -> None:
    """Gives XLA:CPU a thread pool that cannot starve, before its backend starts.

    Args:
        num_devices: number of virtual CPU devices that the backend will have.
    """
    os.environ.setdefault("NPROC", str(_POOL_THREADS_PER_DEVICE * num_devices))


def lookup(name: str) -> str | None:
    """Returns what another program has put into the environment.

    Args:
        name: the variable's full name.

    Returns:
        Its text without surrounding white space; None where it is not set, or empty.
    """
    return os.environ.get(name, "").strip() or None


def snapshot() -> dict[str, str]:
    """Returns all variables of this process, for those that it starts.

    Returns:
        A copy: what is changed in it changes nothing here.
    """
    return dict(os.environ)


def path_with_this_python() -> str:
    """Returns `PATH` with the folder of this interpreter in front, for processes that look for it.

    Returns:
        The text of the variable.
    """
    folder = os.path.dirname(sys.executable)
    return os.pathsep.join(filter(None, (folder, os.environ.get("PATH"))))


def replace(variables: Mapping[str, str]) -> None:
    """Gives this process other variables, for one that was forked to be another's.

    Args:
        variables: all that it is to have.
    """
    os.environ.clear()
    os.environ.update(variables)


def set_defaults(variables: Mapping[str, str]) -> None:
    """Sets variables that are not set, for a library that has no other setting.

    Args:
        variables: what they are to be.
    """
    for name, text in variables.items():
        os.environ.setdefault(name, text)


def note_what_was_read() -> None:
    """Notes the settings that JAX and Keras have read when they were loaded: now."""
    _read_settings.append(_settings())


def require_what_was_read() -> None:
    """Raises where a setting has changed that JAX or Keras would have read, were they loaded anew.

    Raises:
        RuntimeError: one has, after `note_what_was_read`.
    """
    if not _read_settings:
        return
    before, now = _read_settings[-1], _settings()
    for name in sorted(before.keys() | now.keys()):
        if before.get(name) != now.get(name):
            raise RuntimeError(
                explain(
                    f"The program sets {name} to {now.get(name)!r}, but JAX was loaded before it "
                    "began, with this start of the tasks.",
                    expected="settings of JAX and Keras that stand before the program starts.",
                    fix="set it outside of the program, or pass --cold-restarts to the launcher.",
                )
            )


def _settings() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(_SETTINGS)}


def without_cluster() -> dict[str, str]:
    """Returns the variables for a process beside this one that is no member of its cluster.

    Returns:
        A copy without what names a cluster, and with the CPU as the only kind of device.
    """
    prefixes = ("TF_CONFIG", "JAX_", "XLA_", "PET_", "OMPI_", "SLURM_", "NPROC")
    kept = {name: text for name, text in os.environ.items() if not name.startswith(prefixes)}
    return {**kept, "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}


def visible_gpus() -> tuple[str, ...] | None:
    """Returns which GPUs `CUDA_VISIBLE_DEVICES` leaves to this process.

    Returns:
        Their ids up to the first that names none, as CUDA reads them; None where the variable is
        not set, so that all are visible. What `show_gpus` has written is left out of account.
    """
    text = os.environ.get("CUDA_VISIBLE_DEVICES")
    if text is not None and text == _shown_gpus.get("after"):
        text = _shown_gpus["before"]
    if text is None:
        return None
    ids = [part.strip() for part in text.split(",")]
    is_gpu = (bool(i) and not i.startswith("-") and i != "NoDevFiles" for i in ids)
    return tuple(i for i, _ in zip(ids, itertools.takewhile(bool, is_gpu), strict=False))


def show_gpus(ids: Iterable[str]) -> None:
    """Makes only some GPUs visible to this process, before its backend starts.

    Args:
        ids: the GPUs, as `CUDA_VISIBLE_DEVICES` names them.
    """
    text, before = ",".join(ids), os.environ.get("CUDA_VISIBLE_DEVICES")
    if before is None or before != _shown_gpus.get("after"):
        _shown_gpus["before"] = before
    _shown_gpus["after"] = os.environ["CUDA_VISIBLE_DEVICES"] = text
