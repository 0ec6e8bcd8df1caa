"""Options of a launch, and the allowed numbers of its workers."""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Callable
from typing import Any, Literal, TypedDict

from stratagem import settings
from stratagem.errors import UnavailableError, check_type, explain, invalid
from stratagem.resources import checked_folder
from stratagem.settings import DELAY, FOLDER, LOG_LEVELS, SECONDS, SETTINGS, SWITCH, TEXT


class LaunchArguments(TypedDict, total=False):
    """The fields of `LaunchOptions` as optional keyword arguments."""

    workers: int
    chief: bool
    ps: int
    evaluator: bool
    input_workers: int
    devices_per_worker: int | None
    max_restarts: int
    max_preemptions: int | None
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
    nnodes: int | None
    node_rank: int | None
    coordinator: str | None


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
        max_preemptions: maximum number of restarts after preemptions, in which tasks saved and
            exited with code 42. None for no limit. Beyond it the job ends with code 42. Restarts
            after failures are counted apart.
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
        nnodes: number of nodes (machines). Each runs this launch, and starts its `workers`. None
            for this machine, or for the nodes of a Slurm step, of `mpirun` or of a TrainJob.
        node_rank: rank of this node. None if the scheduler provides it.
        coordinator: "HOST:PORT" of node 0, at which process 0 listens. None if the scheduler
            provides it.

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
    max_preemptions: int | None = None
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
    nnodes: int | None = None
    node_rank: int | None = None
    coordinator: str | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None or field.default is not None:
                _check_kind(field.name, value)
        shown = SETTINGS["show"].kind.limits["enum"]
        if self.show not in shown:
            raise invalid(
                f"show={self.show!r} is not a valid choice.",
                expected=f"one of {shown}.",
                fix='pass "all", or "leader" for the output of the leader alone.',
            )
        if self.log_level is not None and self.log_level not in LOG_LEVELS:
            raise invalid(
                f"log_level={self.log_level!r} is not a log level.",
                expected=f"one of {list(LOG_LEVELS)}.",
                fix='pass "info", for example, or None for that of the environment.',
            )
        if not self.workers and not self.chief:
            raise invalid(
                "workers=0 without a chief leaves no task to train.",
                expected="at least one worker, or a chief.",
                fix="pass workers=1.",
            )
        self._check_membership()
        self._check_survivors()

    def _check_membership(self) -> None:
        if self.min_workers is None and self.max_workers is None:
            return
        if not (self.min_workers or self.workers) <= self.workers <= self.full_workers:
            raise invalid(
                f"min_workers={self.min_workers}, workers={self.workers} and "
                f"max_workers={self.max_workers} contradict each other.",
                expected="min_workers <= workers <= max_workers.",
                fix="correct them; an omitted max_workers equals workers.",
            )

    def _check_survivors(self) -> None:
        """Raises ValueError for options of jobs whose workers all restart together."""
        others = [name for name in ("min_workers", "max_workers", "ps") if getattr(self, name)]
        if self.survivors and others:
            raise invalid(
                f"survivors=True was passed with {others[0]}={getattr(self, others[0])}.",
                expected="one of them: workers of an ElasticStrategy continue however many are "
                "left, without restarts of all and without parameter servers.",
                fix=f"leave out {others[0]} with ElasticStrategy, and survivors=True otherwise.",
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
        check_type(name, value, int, "a whole number")
        if value < (least := kind.limits["minimum"]):
            raise invalid(
                f"{name}={value} is too small.",
                expected=f"at least {least}.",
                fix=f"increase {name}, or omit it.",
            )
    elif kind is SWITCH:
        check_type(name, value, bool, "True or False")
    elif kind in (SECONDS, DELAY):
        check_type(name, value, int | float, "a number of seconds")
        if math.isnan(value) or value < 0:
            raise invalid(
                f"{name}={value} is not a valid number of seconds.",
                expected="0 seconds or more.",
                fix=f"pass a number of seconds; {name}=0 does not wait.",
            )
    elif kind is TEXT:
        check_type(name, value, str, '"HOST:PORT"')
    elif kind is FOLDER:
        check_type(name, value, str | os.PathLike, "a path, or None for no files")
        checked_folder(name, value)


# Elastic membership: allowed numbers of workers, and discovery of available workers.

_DISCOVER_EVERY_S = 1.0
_POLL_S = 0.05


@dataclasses.dataclass(frozen=True)
class ElasticConfig:
    """Numbers of workers with which training may continue.

    When the number changes, all tasks restart from their last checkpoint. The global batch size
    stays the same.

    Args:
        min_workers: smallest number of workers.
        max_workers: number of workers when all are available; None for the `workers` of the
            launch.
        discover: returns the number of workers that can run. It is called before each start, and
            once a second while workers are missing, so it must not block. None if that is unknown:
            the launcher then tries.

    Raises:
        TypeError: a number is not an int, or `discover` is not callable.
        ValueError: `min_workers` is less than 1 or greater than `max_workers`.

    Example:
        >>> sg.ElasticConfig(2, 4)
        ElasticConfig(min_workers=2, max_workers=4, discover=None)

    Source: specific to Stratagem.
    """

    min_workers: int
    max_workers: int | None = None
    discover: Callable[[], int] | None = None

    def __post_init__(self) -> None:
        most = self.min_workers if self.max_workers is None else self.max_workers
        for name, value in (("min_workers", self.min_workers), ("max_workers", most)):
            check_type(name, value, int, "a whole number")
        if not 1 <= self.min_workers <= most:
            raise invalid(
                f"min_workers={self.min_workers} and max_workers={self.max_workers} are not a "
                "valid range.",
                expected="1 <= min_workers <= max_workers.",
                fix="lower min_workers, or raise max_workers.",
            )
        if self.discover is not None and not callable(self.discover):
            raise TypeError(
                explain(
                    f"discover={self.discover!r} is not callable.",
                    expected="a function that returns the number of workers that can run, or None.",
                    fix="pass discover=lambda: 4, for example.",
                )
            )


class Discovery:
    """Discovers how many workers can run, at most once a second and at most `full_workers`."""

    def __init__(self, config: ElasticConfig, full_workers: int) -> None:
        self._config = config
        self._full_workers = full_workers
        self._discovered_at_s = -_DISCOVER_EVERY_S
        self._num_workers = 0

    def num_workers(self) -> int | None:
        """Returns the number of workers that can run, or None if unknown."""
        discover = self._config.discover
        if discover is None:
            return None
        now_s = time.monotonic()
        if now_s - self._discovered_at_s >= _DISCOVER_EVERY_S:
            self._discovered_at_s = now_s
            self._num_workers = min(self._full_workers, discover())
        return self._num_workers

    def wait(self, wanted: int, is_over: Callable[[], bool]) -> int:
        """Waits until enough workers can run, and returns how many to start; 0 once `is_over()`.

        Returns `wanted` if the number is unknown. Raises UnavailableError if too few can run for
        longer than the limit.
        """
        least, started_s = self._config.min_workers, time.monotonic()
        limit_s = settings.read("join_timeout_s")
        while (found := self.num_workers()) is not None and found < least:
            if is_over():
                return 0
            if time.monotonic() - started_s > limit_s:
                missing = ", ".join(f"worker {index}" for index in range(max(0, found), least))
                raise UnavailableError(
                    explain(
                        f"{found} of at least {least} workers can run; {missing} did not return "
                        f"within {limit_s:g} s.",
                        expected=f"min_workers={least} within STRATAGEM_JOIN_TIMEOUT_S.",
                        fix="check why they cannot run, lower min_workers, or raise the limit.",
                    )
                )
            time.sleep(_POLL_S)
        return wanted if found is None else found
