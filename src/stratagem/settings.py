"""The settings: one table, from which every way to set one comes, and every text about it.

From it come the reader of environment variables, the options of `stratagem launch`,
`stratagem config`, and the checks of the reference pages.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from stratagem import environment
from stratagem.errors import invalid

# Kinds of values: how text becomes one.

LOG_LEVELS = ("auto", "debug", "info", "warning", "error")

_SWITCHES = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("", "0", "false", "no", "off"), False),
}


# Compared by identity: a folder and a text are the same value, but not on a command line.
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Kind:
    """Kind of a setting's value.

    `limits` are bounds of its `type`, by the keywords of JSON Schema. Messages say that wrong text
    is not `name`; `noun` describes valid values, and `expected` valid text.
    """

    type: Any
    limits: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    name: str = ""
    noun: str = ""
    expected: str = ""

    def __call__(self, default: Any, description: str, **rest: Any) -> partial[Setting]:
        """Returns a setting of this kind, but for its name."""
        return partial(Setting, kind=self, default=default, description=description, **rest)

    def parse(self, text: str) -> Any:
        """Returns the value of a text; raises ValueError for wrong text."""
        value = self._parsed(text)
        if value is None:
            raise invalid(
                f"{text!r} is not {self.name}.",
                expected=self.expected or f"{self.noun}.",
                fix="correct or unset the environment variable.",
            )
        return value

    def _parsed(self, text: str) -> Any:
        if self.type is bool:
            return _SWITCHES.get(text.lower())
        if self.type is int:
            is_count = text.isdecimal() and int(text) >= self.limits["minimum"]
            return int(text) if is_count else None
        if self.type == int | float:
            return self._number(text)
        if "enum" in self.limits:
            return text.lower() if text in self.limits["enum"] else None
        return text

    def _number(self, text: str) -> float | None:
        try:
            value = float(text)
        except ValueError:
            return None
        least, above = self.limits.get("minimum", 0), self.limits.get("exclusiveMinimum", -1)
        return value if value >= least and above < value < math.inf else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """One setting.

    `description` says what it does. An option of `stratagem launch` may be a setting of every
    process, too, and do more there (`in_process`). It may have an `alias`, a `metavar` for its
    value, and a text for what holds while it is `unset`.
    """

    name: str
    kind: Kind
    default: Any
    description: str
    is_option: bool
    in_process: str = ""
    alias: str = ""
    metavar: str | None = None
    unset: str = ""

    @property
    def variable(self) -> str:
        """Environment variable."""
        return f"STRATAGEM_{self.name.upper()}"

    @property
    def key(self) -> str:
        """Name of the option, without its `--`."""
        return self.name.replace("_", "-")

    @property
    def meaning(self) -> str:
        """Effect in every process; empty for an option that only the launcher reads."""
        return self.in_process or ("" if self.is_option else self.description)


def _count(minimum: int) -> Kind:
    noun = f"an integer of at least {minimum}"
    return Kind(type=int, limits={"minimum": minimum}, name="a count", noun=noun)


def choice(
    name: str, values: tuple[str, ...], expected: str = "", *, any_case: bool = False
) -> Kind:
    """Returns the kind of a setting that is one of some words, in lower case.

    `name` describes them in the message about another word; `expected` explains them. `any_case`
    also accepts them in upper case.
    """
    words = [*values, *(value.upper() for value in values if any_case)]
    noun = f"one of {', '.join(values)}"
    return Kind(type=str, limits={"enum": words}, name=name, noun=noun, expected=expected)


SWITCH = Kind(
    type=bool,
    name="a boolean",
    noun="true or false",
    expected="1, true, yes, on, or 0, false, no, off.",
)
COUNT = _count(1)
NUMBER = _count(0)
SECONDS = Kind(
    type=int | float,
    limits={"exclusiveMinimum": 0},
    name="a time limit",
    noun="a number of seconds above 0",
)
DELAY = Kind(
    type=int | float,
    limits={"minimum": 0},
    name="a time",
    noun="a number of seconds of at least 0",
)
TEXT = Kind(type=str, noun="a string")
FOLDER = Kind(type=str, noun="a string")
FILE = Kind(type=str, noun="a string")
_SHOWN = choice("a choice", ("all", "leader"))
_LEVEL = choice("a log level", LOG_LEVELS, any_case=True)
_FORMAT = choice("a log format", ("text", "json"))
_PLATFORM = choice(
    "a platform for TPUStrategy",
    ("tpu", "cpu"),
    '"tpu", or "cpu" to try a TPU program on this machine.',
)


# The table. A row is a kind, called with the default and the description.

# Options of `stratagem launch`, in the order of its help.
_OPTIONS = {
    "workers": NUMBER(
        1, "Number of workers, of each node if there are several.", alias="nproc-per-node"
    ),
    "chief": SWITCH(False, "Add a chief."),
    "ps": NUMBER(0, "Number of parameter servers."),
    "evaluator": SWITCH(False, "Add an evaluator."),
    "input_workers": NUMBER(0, "Number of input workers, which read datasets for all tasks."),
    "devices_per_worker": COUNT(
        None,
        "GPUs per worker, or virtual CPU devices if there is no GPU.",
        unset="the GPUs shared evenly",
    ),
    "max_restarts": NUMBER(0, "Maximum number of restarts of all tasks after a failure."),
    "max_preemptions": NUMBER(
        None, "Maximum number of restarts after tasks saved and exited.", unset="no limit"
    ),
    "min_workers": COUNT(
        None, "After a worker fails, continue without it, with at least this many workers."
    ),
    "max_workers": COUNT(None, "Number of workers once all are back; by default --workers."),
    "rejoin_after_s": DELAY(60.0, "Seconds that fewer workers run before all restart."),
    "cold_restarts": SWITCH(
        False, "Load JAX and Keras again in each restarted task, instead of forking it."
    ),
    "survivors": SWITCH(
        False, "Leave the other workers running if one fails, as ElasticStrategy needs it."
    ),
    "log_dir": FOLDER(None, "Folder for one log file per task."),
    "run_dir": FOLDER(None, "Folder for the run's events, for `stratagem goodput`."),
    "show": _SHOWN("all", "Tasks whose output is shown here."),
    "grace_s": DELAY(10.0, "Seconds that a task may take to exit before it is killed."),
    "evaluator_grace_s": DELAY(60.0, "Seconds that the evaluator may run after the workers end."),
    "log_level": _LEVEL(
        "auto",
        "Lowest level of log records that tasks show.",
        in_process="Lowest level of log records shown; `auto`: INFO on the leader, else WARNING.",
    ),
    "nnodes": COUNT(
        None,
        "Number of nodes (machines), each of which runs this command. By default 1, or those of a "
        "Slurm step, of `mpirun` or of a TrainJob.",
    ),
    "node_rank": NUMBER(None, "Rank of this node. Process 0 runs on node 0."),
    "coordinator": TEXT(None, "Address of node 0 at which process 0 listens.", metavar="HOST:PORT"),
}
# Settings of every process of the library.
_OF_PROCESSES = {
    "run_eagerly": SWITCH(
        False, "Run replica functions op by op, with one thread per replica, for debugging."
    ),
    "filter_tracebacks": SWITCH(True, "Hide frames of this library in tracebacks."),
    "log_format": _FORMAT(
        "text", "Format of log records on stderr: `text`, or `json` for one object per line."
    ),
    "foreign_lines": SWITCH(
        False, "Show log lines of Gloo and of JAX's coordination service, for debugging."
    ),
    "program_cache_size": COUNT(
        256, "Number of compiled replica functions that a strategy caches."
    ),
    "cache_dir": FOLDER(
        "~/.cache/stratagem",
        "Folder for compiled programs and other files that later runs use again.",
    ),
    "compilation_cache_bytes": NUMBER(
        2 * 2**30, "Maximum size of the compiled programs in the cache folder; 0 stores none."
    ),
    "keep_freed_memory": SWITCH(
        True, "Keep memory that a step on CPU devices has freed for the next step (glibc only)."
    ),
    "fast_convolutions": SWITCH(
        True, "Compute convolutions on CPU devices in the form that is fastest there."
    ),
    "join_timeout_s": SECONDS(
        300.0, "How long the processes of a cluster wait for each other at startup."
    ),
    "peer_timeout_s": SECONDS(30.0, "How long a process may be silent before the others give up."),
    "stuck_timeout_s": SECONDS(
        120.0, "How long a live process may make no progress while others wait for it."
    ),
    "barrier_timeout_s": SECONDS(300.0, "How long processes wait for each other at a barrier."),
    "checkpoint_timeout_s": SECONDS(3600.0, "How long an evaluator waits for the next checkpoint."),
    "save_timeout_s": SECONDS(
        1800.0, "How long processes wait for another to read or write a checkpoint."
    ),
    "client_timeout_s": SECONDS(
        60.0, "How long a job that ends with its client runs while the client is silent."
    ),
    "jobs_port": COUNT(8265, "Port on which the leader's server accepts jobs of clients."),
    "input_service": TEXT("", "Address of the input service of this run, `HOST:PORT`."),
    "upload_limit_bytes": COUNT(
        100 * 2**20, "Maximum size of the files that a client sends with its program."
    ),
    "pod_grace_s": SECONDS(
        30.0, "The pod's `terminationGracePeriodSeconds`: seconds from SIGTERM to SIGKILL."
    ),
    "secret_file": FILE(
        "", "File of mode 0600 with the secret of the run, if `STRATAGEM_SECRET` is not set."
    ),
    "allow_unauthenticated": SWITCH(
        False, "Run on several hosts without a secret: strangers on the network can join."
    ),
    "handshake_timeout_s": SECONDS(
        10.0, "How long a new connection may take to prove the secret, and then to say hello."
    ),
    "max_handshakes": COUNT(
        256, "Connections of a port that may prove the secret at once; the oldest is closed."
    ),
    "max_handshakes_per_address": COUNT(64, "The same limit for the connections from one address."),
    "tls_dir": FOLDER(
        "", "Folder with `tls.crt`, `tls.key` and `ca.crt`, to encrypt connections of hosts."
    ),
    "tpu_platform": _PLATFORM(
        "tpu", "With `cpu`, CPU devices stand in for the chips of a TPU, to try a program."
    ),
}
SETTINGS = {
    name: row(name=name, is_option=name in _OPTIONS)
    for name, row in (_OPTIONS | _OF_PROCESSES).items()
}


def read(name: str) -> Any:
    """Returns a setting from the environment, or its default.

    Raises ValueError for invalid text.
    """
    setting = SETTINGS[name]
    text = environment.get(setting.variable)
    if text is None:
        return setting.default
    try:
        return setting.kind.parse(text)
    except ValueError as error:
        raise ValueError(f"Environment variable {setting.variable}: {error}") from error
