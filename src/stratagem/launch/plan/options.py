"""Options of a launch."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

from stratagem.errors import explain
from stratagem.resources import checked_folder
from stratagem.settings import DELAY, FOLDER, LOG_LEVELS, SECONDS, SETTINGS, SWITCH

# Numbers of nodes, and the node of each task.

_RANGE = re.compile(r"(\d+)(?::(\d+))?")


def node_range(nnodes: int | str) -> tuple[int, int]:
    """Returns the least and the largest number of nodes. Raises ValueError if it is malformed.

    Example:
        >>> node_range("2:4"), node_range(3)
        ((2, 4), (3, 3))
    """
    match = _RANGE.fullmatch(str(nnodes).strip())
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= least <= most:
        raise ValueError(
            explain(
                f"nnodes={nnodes!r} is not a number of nodes.",
                expected="N, or MIN:MAX with 1 <= MIN <= MAX.",
                fix="write --nnodes 4, or --nnodes 2:4 to continue with two nodes.",
            )
        )
    return least, most


def tasks_of_nodes(
    workers: list[int],
    *,
    chief: bool,
    ps: int,
    evaluator: bool,
    input_workers: Sequence[int] = (),
) -> list[tuple[str, int, int]]:
    """Returns type, index and node of each task, the leader first.

    `workers` and `input_workers` have the numbers of each node. Servers are distributed over the
    nodes in turn; chief and evaluator run on node 0. The input workers of a node are one task.

    Example:
        >>> tasks_of_nodes([1, 2], chief=False, ps=1, evaluator=False)
        [('worker', 0, 0), ('worker', 1, 1), ('worker', 2, 1), ('ps', 0, 0)]
    """
    nodes_of_workers = [node for node, count in enumerate(workers) for _ in range(count)]
    nodes_of_inputs = [node for node, count in enumerate(input_workers) if count]
    return [
        *([("chief", 0, 0)] if chief else []),
        *(("worker", index, node) for index, node in enumerate(nodes_of_workers)),
        *(("ps", index, index % len(workers)) for index in range(ps)),
        *([("evaluator", 0, 0)] if evaluator else []),
        *(("input", index, node) for index, node in enumerate(nodes_of_inputs)),
    ]


_NODE_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "nnodes": ((int, str), 'a number, or "MIN:MAX".'),
    "rdzv_endpoint": ((str,), '"HOST:PORT".'),
    "hosts": ((str, list, tuple), "names of hosts, as a list or separated by commas."),
    "hostfile": ((str, os.PathLike), "a path."),
    "ssh_options": ((str,), 'options as in a shell, such as "-p 2222".'),
    "env": ((list, tuple), 'a list of "NAME=VALUE" or "NAME".'),
}


class LaunchArguments(TypedDict, total=False):
    """The fields of `LaunchOptions` as optional keyword arguments."""

    workers: int
    chief: bool
    ps: int
    evaluator: bool
    input_workers: int
    devices_per_worker: int | None
    max_restarts: int
    min_workers: int | None
    max_workers: int | None
    rejoin_after_s: float
    cold_restarts: bool
    survivors: bool
    log_dir: str | os.PathLike[str] | None
    run_dir: str | os.PathLike[str] | None
    show: Literal["all", "leader"]
    grace_s: float
    evaluator_grace_s: float
    log_level: Literal["auto", "debug", "info", "warning", "error"] | None
    nnodes: int | str | None
    node_rank: int | None
    rdzv_endpoint: str | None
    node_timeout_s: float
    hosts: str | Sequence[str] | None
    hostfile: str | os.PathLike[str] | None
    ssh_options: str | None
    env: Sequence[str] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """Tasks to start, their devices, and how they restart and end.

    Args:
        workers: number of workers, of each node if there are several. Worker 0 leads, unless there
            is a chief.
        chief: True to add a chief, which leads.
        ps: number of parameter servers.
        evaluator: True to add an evaluator.
        input_workers: number of input workers. They read datasets in a task of their own, whose
            address the others find in `STRATAGEM_INPUT_SERVICE`.
        devices_per_worker: number of GPUs per worker, or of virtual CPU devices on a machine
            without GPUs. None divides the GPUs evenly and does not change the CPU.
        max_restarts: maximum number of restarts of all tasks after failures.
        min_workers: after a worker fails, all tasks restart without it, with at least this many
            workers. None always restarts the same number.
        max_workers: number of workers when all are available; None for `workers`.
        rejoin_after_s: seconds to train with fewer workers before they are asked to save and
            exit, so that `max_workers` can start.
        cold_restarts: True to load JAX and Keras again in each restarted task.
        survivors: True if workers continue without one that fails, as under `ElasticStrategy`.
            A lost worker starts again while the others run, up to `max_restarts` times in all.
            The job fails if no worker ends well.
        log_dir: folder for one log file per task; None for no files.
        run_dir: folder for the events of the run, which `stratagem goodput` reads; None for none.
        show: "all" shows the output of every task, "leader" only the leader's.
        grace_s: seconds that a task may take to end before it is killed.
        evaluator_grace_s: seconds that the evaluator may continue after the workers have ended.
        log_level: lowest level of log records that tasks show, as in `sg.config.show_logs`; None
            for that of this process's environment.
        nnodes: number of nodes (machines), or "MIN:MAX" to continue without lost ones. Each runs
            this launch. None for this machine, or for the hosts or the nodes of a Slurm step.
        node_rank: rank of this node. Node 0 starts and watches all tasks. None if the scheduler
            provides it, or node 0 may choose.
        rdzv_endpoint: "HOST:PORT" of node 0, where the nodes meet.
        node_timeout_s: seconds without an answer after which a node is lost.
        hosts: hosts, as a list or separated by commas, on which `ssh` starts this launch.
        hostfile: file with one host per line, optionally with `slots=N` for its workers.
        ssh_options: options of the `ssh` program, as in a shell.
        env: variables for all hosts: "NAME=VALUE", or "NAME" for the value here.

    Raises:
        TypeError: an option has the wrong type.
        ValueError: an option is out of range, or no task trains.

    Example:
        >>> sg.launch.LaunchOptions(workers=4, ps=2).task_types
        ('worker', 'worker', 'worker', 'worker', 'ps', 'ps')

    Source: specific to Stratagem.
    """

    workers: int = 1
    chief: bool = False
    ps: int = 0
    evaluator: bool = False
    input_workers: int = 0
    devices_per_worker: int | None = None
    max_restarts: int = 0
    min_workers: int | None = None
    max_workers: int | None = None
    rejoin_after_s: float = 60.0
    cold_restarts: bool = False
    survivors: bool = False
    log_dir: str | os.PathLike[str] | None = None
    run_dir: str | os.PathLike[str] | None = None
    show: Literal["all", "leader"] = "all"
    grace_s: float = 10.0
    evaluator_grace_s: float = 60.0
    log_level: Literal["auto", "debug", "info", "warning", "error"] | None = None
    nnodes: int | str | None = None
    node_rank: int | None = None
    rdzv_endpoint: str | None = None
    node_timeout_s: float = 15.0
    hosts: str | Sequence[str] | None = None
    hostfile: str | os.PathLike[str] | None = None
    ssh_options: str | None = None
    env: Sequence[str] | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None or field.default is not None:
                _check_kind(field.name, value)
        shown = SETTINGS["show"].kind.limits["enum"]
        if self.show not in shown:
            raise ValueError(
                explain(
                    f"show={self.show!r} is not a valid choice.",
                    expected=f"one of {shown}.",
                    fix='pass "all", or "leader" for the output of the leader alone.',
                )
            )
        if self.log_level is not None and self.log_level not in LOG_LEVELS:
            raise ValueError(
                explain(
                    f"log_level={self.log_level!r} is not a log level.",
                    expected=f"one of {list(LOG_LEVELS)}.",
                    fix='pass "info", for example, or None for that of the environment.',
                )
            )
        if not self.workers and not self.chief:
            raise ValueError(
                explain(
                    "workers=0 without a chief leaves no task to train.",
                    expected="at least one worker, or a chief.",
                    fix="pass workers=1.",
                )
            )
        self._check_membership()
        self._check_survivors()
        self._check_nodes()

    def _check_membership(self) -> None:
        if self.min_workers is None and self.max_workers is None:
            return
        if not (self.min_workers or self.workers) <= self.workers <= self.full_workers:
            raise ValueError(
                explain(
                    f"min_workers={self.min_workers}, workers={self.workers} and "
                    f"max_workers={self.max_workers} contradict each other.",
                    expected="min_workers <= workers <= max_workers.",
                    fix="correct them; an omitted max_workers equals workers.",
                )
            )

    def _check_survivors(self) -> None:
        """Raises ValueError for options of jobs whose workers all restart together."""
        others = [name for name in ("min_workers", "max_workers", "ps") if getattr(self, name)]
        if self.survivors and others:
            raise ValueError(
                explain(
                    f"survivors=True was passed with {others[0]}={getattr(self, others[0])}.",
                    expected="one of them: workers of an ElasticStrategy continue however many are "
                    "left, without restarts of all and without parameter servers.",
                    fix=f"leave out {others[0]} with ElasticStrategy, and survivors=True "
                    "otherwise.",
                )
            )

    def _check_nodes(self) -> None:
        for name, (wanted, expected) in _NODE_TYPES.items():
            if getattr(self, name) is not None:
                _check_type(name, getattr(self, name), wanted, expected)
        if self.nnodes is not None:
            node_range(self.nnodes)
        if not self.node_timeout_s:
            raise ValueError(
                explain(
                    "node_timeout_s=0.0 is not a valid number of seconds.",
                    expected="more than 0 seconds.",
                    fix="omit it for 15 seconds.",
                )
            )

    def with_workers(self, num_workers: int) -> LaunchOptions:
        """Returns these options for another number of workers."""
        return dataclasses.replace(self, workers=num_workers)

    @property
    def full_workers(self) -> int:
        """Number of workers when all are available."""
        return self.workers if self.max_workers is None else self.max_workers

    @property
    def task_types(self) -> tuple[str, ...]:
        """The type of every task, the leader first."""
        return (
            *(["chief"] if self.chief else []),
            *(["worker"] * self.workers),
            *(["ps"] * self.ps),
            *(["evaluator"] if self.evaluator else []),
            *(["input"] if self.input_workers else []),
        )


def _check_kind(name: str, value: Any) -> None:
    kind = SETTINGS[name].kind
    if kind.type is int:
        _check_count(name, value, kind.limits["minimum"])
    elif kind is SWITCH:
        _check_type(name, value, bool, "True or False.")
    elif kind in (SECONDS, DELAY):
        _check_seconds(name, value)
    elif kind is FOLDER:
        _check_type(name, value, str | os.PathLike, "a path, or None for no files.")
        checked_folder(name, value)


def _check_type(
    name: str, value: object, wanted: type | types.UnionType | tuple[type, ...], expected: str
) -> None:
    # Python counts True as an int; here it is a mistake.
    if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
        raise TypeError(
            explain(
                f"{name}={value!r} is of type {type(value).__name__}.",
                expected=expected,
                fix=f"change the type of {name}.",
            )
        )


def _check_count(name: str, value: int, least: int) -> None:
    _check_type(name, value, int, "a whole number.")
    if value < least:
        raise ValueError(
            explain(
                f"{name}={value} is too small.",
                expected=f"at least {least}.",
                fix=f"increase {name}, or omit it.",
            )
        )


def _check_seconds(name: str, value: float) -> None:
    _check_type(name, value, int | float, "a number of seconds.")
    if math.isnan(value) or value < 0:
        raise ValueError(
            explain(
                f"{name}={value} is not a valid number of seconds.",
                expected="0 seconds or more.",
                fix=f"pass a number of seconds; {name}=0 does not wait.",
            )
        )


# Hosts of a launch by SSH, from a list or a file, and the variables that they get.

_LINE = re.compile(r"(\S+?)(?:\s+slots\s*=\s*(\d+))?")
_FORWARDED = ("STRATAGEM_", "JAX_", "KERAS_", "XLA_FLAGS")
# Options that differ by host or concern this terminal alone.
_OWN = (
    "workers",
    "nnodes",
    "node_rank",
    "rdzv_endpoint",
    "hosts",
    "hostfile",
    "ssh_options",
    "env",
)


@dataclasses.dataclass(frozen=True)
class Host:
    """A host as `ssh` knows it, and its number of workers; None for that of the launch."""

    name: str
    slots: int | None = None


def read_hosts(options: LaunchOptions) -> list[Host]:
    """Returns the hosts of the options, in order; none for a launch on this machine.

    Raises ValueError if they are malformed, OSError if the file cannot be read.
    """
    hosts = options.hosts
    if options.hostfile is None:
        names = hosts.split(",") if isinstance(hosts, str) else list(hosts or ())
        found = [Host(name.strip()) for name in names]
    elif hosts is not None:
        raise ValueError(
            explain(
                f"hosts={hosts!r} and hostfile={os.fspath(options.hostfile)!r} are both given.",
                expected="one of them.",
                fix="remove one.",
            )
        )
    else:
        lines = Path(options.hostfile).read_text(encoding="utf-8").splitlines()
        texts = [line.partition("#")[0].strip() for line in lines]
        found = [_host(text) for text in texts if text]
    names = [host.name for host in found]
    # A name that begins with a dash would be an option of ssh.
    invalid = [name for name in names if not name or name.startswith("-")]
    if invalid or len(set(names)) < len(names) or (options.hostfile is not None and not names):
        raise ValueError(
            explain(
                f"The hosts are {names}.",
                expected="at least one host, and each once.",
                fix="write --hosts a,b,c, or one host per line of the file; several workers of a "
                "host are --workers N, or slots=N in the file.",
            )
        )
    return found


def remote_flags(options: LaunchOptions, host: Host, *, rank: int, endpoint: str) -> list[str]:
    """Returns the options of the launcher on a host, on its command line."""
    nnodes = options.nnodes or len(read_hosts(options))
    workers = options.workers if host.slots is None else host.slots
    flags = ["--workers", str(workers), "--nnodes", str(nnodes)]
    flags += ["--node-rank", str(rank), "--rdzv-endpoint", endpoint]
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if field.name not in _OWN and value != field.default:
            flag = f"--{field.name.replace('_', '-')}"
            flags += [flag] if value is True else [flag, str(value)]
    return flags


def remote_variables(options: LaunchOptions, base: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that are set on every host: settings, and those of `env`.

    Raises ValueError for a name in `env` that is not set here.
    """
    # They are on the command line, with the values that take precedence.
    own = {setting.variable for setting in SETTINGS.values() if setting.is_option}
    own |= {"STRATAGEM_CONFIG", "STRATAGEM_SECRET_FILE"}  # names of files of this machine
    variables = {
        name: text for name, text in base.items() if name.startswith(_FORWARDED) and name not in own
    }
    for one in options.env or ():
        name, is_given, text = one.partition("=")
        if not name or (not is_given and name not in base):
            raise ValueError(
                explain(
                    f"env={one!r} has no value.",
                    expected="NAME=VALUE, or the NAME of a variable that is set here.",
                    fix="set the variable, or pass its value.",
                )
            )
        variables[name] = text if is_given else base[name]
    return variables


def _host(text: str) -> Host:
    match = _LINE.fullmatch(text)
    if match is None:
        raise ValueError(
            explain(
                f"The hostfile has the line {text!r}.",
                expected="a host, or a host and slots=N.",
                fix="correct it; comments begin with #.",
            )
        )
    return Host(match[1], None if match[2] is None else int(match[2]))
