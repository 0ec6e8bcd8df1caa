"""The settings: one table, from which every way to set one comes, and every text about it.

From it come the reader of environment variables, the keys of a TOML file with their checks and
their JSON Schema, the options of `stratagem launch`, `stratagem config`, and the checks of the
reference pages.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from stratagem import environment
from stratagem.errors import explain

# Kinds of values: how text becomes one, and what JSON Schema says about it.

LOG_LEVELS = ("auto", "debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")

# JSON type of a Python type, and its name in messages.
_TYPES: dict[Any, tuple[str | list[str], str]] = {
    bool: ("boolean", "true or false"),
    int: ("integer", "an integer"),
    int | float: ("number", "a number"),
    str: ("string", "a string"),
    int | str: (["integer", "string"], "a number or a string"),
    list: ("array", "a list of strings"),
}
_SWITCHES = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("", "0", "false", "no", "off"), False),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """Kind of a setting's value.

    `type` is its type in a TOML file, and `limits` are further keywords of JSON Schema. Messages
    say that wrong text is not `name`; `noun` describes valid values, and `expected` valid text.
    """

    type: Any
    limits: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    name: str = ""
    noun: str = ""
    expected: str = ""

    @property
    def type_noun(self) -> str:
        """Name of the type in messages."""
        return _TYPES[self.type][1]

    @property
    def schema(self) -> dict[str, Any]:
        """JSON Schema of a value in a TOML file."""
        return {"type": _TYPES[self.type][0], **self.limits}

    def has_type(self, value: object) -> bool:
        """Returns True if a value of a TOML file has the type; Python counts True as an int."""
        return isinstance(value, self.type) and isinstance(value, bool) == (self.type is bool)

    def parse(self, text: str) -> Any:
        """Returns the value of a text; raises ValueError for wrong text."""
        value = self._parsed(text)
        if value is None:
            raise ValueError(
                explain(
                    f"{text!r} is not {self.name}.",
                    expected=self.expected or f"{self.noun}.",
                    fix="correct or unset the environment variable.",
                )
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
FACTOR = Kind(
    type=int | float, limits={"exclusiveMinimum": 1}, name="a factor", noun="a number above 1"
)
TEXT = Kind(type=str, noun="a string")
FOLDER = Kind(type=str, noun="a string", expected="the path of a folder.")
FILE = Kind(type=str, noun="a string", expected="the path of a file.")
TEXTS = Kind(type=list, limits={"items": {"type": "string"}})
NODES = Kind(type=int | str, expected="N, or MIN:MAX.")


@dataclasses.dataclass(frozen=True)
class Setting:
    """One setting: its name in Python, the kind of its value, and its default.

    `meaning` is its line in the documentation of environment variables, for a setting that the
    library reads in every process. `option` is its help as an option of `stratagem launch`. Each is
    empty where the setting is not read. The option may have an `alias`, a `metavar` for its value,
    and a text for what holds while it is `unset`.
    """

    name: str
    kind: Kind
    default: Any
    meaning: str = ""
    option: str = ""
    alias: str = ""
    metavar: str | None = None
    unset: str = ""

    @property
    def variable(self) -> str:
        """Environment variable."""
        return f"STRATAGEM_{self.name.upper()}"

    @property
    def key(self) -> str:
        """Key in a TOML file; the option is `--` and the key."""
        return self.name.replace("_", "-")

    @property
    def description(self) -> str:
        """What it does; of an option with a default of the library, what it does in a launch."""
        return self.option or self.meaning


def _option(name: str, kind: Kind, default: Any, option: str, **rest: Any) -> Setting:
    return Setting(name, kind, default, option=option, **rest)


_TABLE = (
    # Options of `stratagem launch`, in the order of its help.
    _option(
        "workers",
        NUMBER,
        1,
        "Number of workers, of each node if there are several.",
        alias="nproc-per-node",
    ),
    _option("chief", SWITCH, False, "Add a chief."),
    _option("ps", NUMBER, 0, "Number of parameter servers."),
    _option("evaluator", SWITCH, False, "Add an evaluator."),
    _option(
        "input_workers", NUMBER, 0, "Number of input workers, which read datasets for all tasks."
    ),
    _option(
        "devices_per_worker",
        COUNT,
        None,
        "GPUs per worker, or virtual CPU devices if there is no GPU.",
        unset="the GPUs shared evenly",
    ),
    _option("max_restarts", NUMBER, 0, "Maximum number of restarts of all tasks after a failure."),
    _option(
        "min_workers",
        COUNT,
        None,
        "After a worker fails, continue without it, with at least this many workers.",
    ),
    _option(
        "max_workers", COUNT, None, "Number of workers once all are back; by default --workers."
    ),
    _option("rejoin_after_s", DELAY, 60.0, "Seconds that fewer workers run before all restart."),
    _option(
        "cold_restarts",
        SWITCH,
        False,
        "Load JAX and Keras again in each restarted task, instead of forking it.",
    ),
    _option(
        "survivors",
        SWITCH,
        False,
        "Leave the other workers running if one fails, as ElasticStrategy needs it.",
    ),
    _option("spares", NUMBER, 0, "Further workers, which wait to take the place of a lost one."),
    _option(
        "evict_slow",
        FACTOR,
        None,
        "End a worker that makes steps take FACTOR times as long, if the others can continue.",
        metavar="FACTOR",
    ),
    _option("evict_after_s", DELAY, 60.0, "Seconds for which a worker must be that slow."),
    _option("max_evictions", NUMBER, 1, "Maximum number of workers to end for being slow."),
    _option("log_dir", FOLDER, None, "Folder for one log file per task."),
    _option("run_dir", FOLDER, None, "Folder for the run's events, for `stratagem goodput`."),
    _option(
        "show", choice("a choice", ("all", "leader")), "all", "Tasks whose output is shown here."
    ),
    _option("grace_s", DELAY, 10.0, "Seconds that a task may take to exit before it is killed."),
    _option(
        "evaluator_grace_s",
        DELAY,
        60.0,
        "Seconds that the evaluator may run after the workers end.",
    ),
    _option(
        "log_level",
        choice("a log level", LOG_LEVELS, any_case=True),
        "auto",
        "Lowest level of log records that tasks show.",
        meaning="Lowest level of log records shown; `auto`: INFO on the leader, else WARNING.",
    ),
    _option(
        "nnodes",
        NODES,
        None,
        "Number of nodes (machines), each of which runs this command; MIN:MAX continues without "
        "lost ones. By default 1, or the nodes of a Slurm step.",
    ),
    _option("node_rank", NUMBER, None, "Rank of this node. Node 0 starts and watches all tasks."),
    _option(
        "rdzv_endpoint", TEXT, None, "Address of node 0, where the nodes meet.", metavar="HOST:PORT"
    ),
    _option(
        "node_timeout_s", SECONDS, 15.0, "Seconds without an answer after which a node is lost."
    ),
    _option("hosts", TEXT, None, "Hosts on which `ssh` starts this command.", metavar="A,B,C"),
    _option(
        "hostfile",
        FILE,
        None,
        "File with one host per line, optionally with slots=N for its workers.",
    ),
    _option("ssh_options", TEXT, None, "Options of the `ssh` program, as in a shell."),
    _option("env", TEXTS, None, "Variable for all hosts. May be repeated.", metavar="NAME[=VALUE]"),
    # Settings of every process of the library.
    Setting(
        "run_eagerly",
        SWITCH,
        False,
        "Run replica functions op by op, with one thread per replica, for debugging.",
    ),
    Setting("filter_tracebacks", SWITCH, True, "Hide frames of this library in tracebacks."),
    Setting(
        "log_format",
        choice("a log format", LOG_FORMATS),
        "text",
        "Format of log records on stderr: `text`, or `json` for one object per line.",
    ),
    Setting(
        "foreign_lines",
        SWITCH,
        False,
        "Show log lines of Gloo and of JAX's coordination service, for debugging.",
    ),
    Setting(
        "program_cache_size",
        COUNT,
        256,
        "Number of compiled replica functions that a strategy caches.",
    ),
    Setting(
        "cache_dir",
        FOLDER,
        "~/.cache/stratagem",
        "Folder for measurements and compiled programs that are cached for later runs.",
    ),
    Setting(
        "compilation_cache_bytes",
        NUMBER,
        2 * 2**30,
        "Maximum size of the compiled programs in the cache folder; 0 stores none.",
    ),
    Setting(
        "keep_freed_memory",
        SWITCH,
        True,
        "Keep memory that a step on CPU devices has freed for the next step (glibc only).",
    ),
    Setting(
        "fast_convolutions",
        SWITCH,
        True,
        "Compute convolutions on CPU devices in the form that is fastest there.",
    ),
    Setting(
        "join_timeout_s",
        SECONDS,
        300.0,
        "How long the processes of a cluster wait for each other at startup.",
    ),
    Setting(
        "peer_timeout_s",
        SECONDS,
        30.0,
        "How long a process may be silent before the others give up.",
    ),
    Setting(
        "stuck_timeout_s",
        SECONDS,
        120.0,
        "How long a live process may make no progress while others wait for it.",
    ),
    Setting(
        "barrier_timeout_s", SECONDS, 300.0, "How long processes wait for each other at a barrier."
    ),
    Setting(
        "checkpoint_timeout_s",
        SECONDS,
        3600.0,
        "How long an evaluator waits for the next checkpoint.",
    ),
    Setting(
        "save_timeout_s",
        SECONDS,
        1800.0,
        "How long processes wait for another to read or write a checkpoint.",
    ),
    Setting(
        "client_timeout_s",
        SECONDS,
        60.0,
        "How long a job that ends with its client runs while the client is silent.",
    ),
    Setting(
        "num_spares",
        NUMBER,
        0,
        "How many of the last processes of an elastic group wait to replace lost ones.",
    ),
    Setting("jobs_port", COUNT, 8265, "Port on which the leader's server accepts jobs of clients."),
    Setting("input_service", TEXT, "", "Address of the input service of this run, `HOST:PORT`."),
    Setting(
        "upload_limit_bytes",
        COUNT,
        100 * 2**20,
        "Maximum size of the files that a client sends with its program.",
    ),
    Setting(
        "pod_grace_s",
        SECONDS,
        30.0,
        "The pod's `terminationGracePeriodSeconds`: seconds from SIGTERM to SIGKILL.",
    ),
    Setting(
        "secret_file",
        FILE,
        "",
        "File of mode 0600 with the secret of the run, if `STRATAGEM_SECRET` is not set.",
    ),
    Setting(
        "allow_unauthenticated",
        SWITCH,
        False,
        "Run on several hosts without a secret: strangers on the network can join.",
    ),
    Setting(
        "handshake_timeout_s",
        SECONDS,
        10.0,
        "How long a new connection may take to prove the secret, and then to say hello.",
    ),
    Setting(
        "max_handshakes",
        COUNT,
        256,
        "Connections of a port that may prove the secret at once; the oldest is closed.",
    ),
    Setting(
        "max_handshakes_per_address",
        COUNT,
        64,
        "The same limit for the connections from one address.",
    ),
    Setting(
        "tls_dir",
        FOLDER,
        "",
        "Folder with `tls.crt`, `tls.key` and `ca.crt`, to encrypt connections of hosts.",
    ),
    Setting(
        "tpu_platform",
        choice(
            "a platform for TPUStrategy",
            ("tpu", "cpu"),
            '"tpu", or "cpu" to try a TPU program on this machine.',
        ),
        "tpu",
        "With `cpu`, CPU devices stand in for the chips of a TPU, to try a program.",
    ),
)
SETTINGS = {setting.name: setting for setting in _TABLE}


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
