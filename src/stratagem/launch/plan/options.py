"""What the launcher is asked for."""

from __future__ import annotations

import dataclasses
import math
import os
from typing import Any, Literal, TypedDict

from stratagem.messages import explain

__all__ = ["LaunchArguments", "LaunchOptions"]

_SHOWN = ("all", "leader")
_LEAST = {
    "workers": 0,
    "ps": 0,
    "devices_per_worker": 1,
    "max_restarts": 0,
    "min_workers": 1,
    "max_workers": 1,
}
_OPTIONAL = ("devices_per_worker", "min_workers", "max_workers")


class LaunchArguments(TypedDict, total=False):
    """The fields of `LaunchOptions` as keyword arguments, each of which may be left out."""

    workers: int
    chief: bool
    ps: int
    evaluator: bool
    devices_per_worker: int | None
    max_restarts: int
    min_workers: int | None
    max_workers: int | None
    rejoin_after_s: float
    cold_restarts: bool
    log_dir: str | os.PathLike[str] | None
    run_dir: str | os.PathLike[str] | None
    show: Literal["all", "leader"]
    grace_s: float
    evaluator_grace_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """Which tasks there are, what each gets, and how they end.

    Args:
        workers: number of workers; worker 0 leads, unless there is a chief.
        chief: a chief beside the workers, which leads.
        ps: number of parameter servers.
        evaluator: an evaluator.
        devices_per_worker: GPUs of each worker where there are any, else virtual CPU devices;
            None shares the GPUs evenly, and leaves the CPU as it is.
        max_restarts: how often all tasks are started again after a failure.
        min_workers: after the failure of a worker all start again without it, with as many at
            least; None starts as many again.
        max_workers: how many there are to be when all are back; None for `workers`.
        rejoin_after_s: how long fewer go on, before they are asked to save and leave, and
            `max_workers` start.
        cold_restarts: load JAX and Keras anew in each restarted task.
        log_dir: folder for a file a task with all that it prints.
        run_dir: folder for the events of the run, which `stratagem goodput` reads.
        show: "all" shows what every task prints, "leader" only what the leader does.
        grace_s: how long a task that was told to end may take, before it is killed.
        evaluator_grace_s: how long the evaluator may go on when the workers have ended.

    Raises:
        TypeError: a value of another type.
        ValueError: a value out of range, or no task that trains.

    Example:
        >>> sg.launch.LaunchOptions(workers=4, ps=2).task_types
        ('worker', 'worker', 'worker', 'worker', 'ps', 'ps')
    """

    workers: int = 1
    chief: bool = False
    ps: int = 0
    evaluator: bool = False
    devices_per_worker: int | None = None
    max_restarts: int = 0
    min_workers: int | None = None
    max_workers: int | None = None
    rejoin_after_s: float = 60.0
    cold_restarts: bool = False
    log_dir: str | os.PathLike[str] | None = None
    run_dir: str | os.PathLike[str] | None = None
    show: Literal["all", "leader"] = "all"
    grace_s: float = 10.0
    evaluator_grace_s: float = 60.0

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            if name not in _OPTIONAL or getattr(self, name) is not None:
                _check_count(name, getattr(self, name), least)
        for name in ("chief", "evaluator", "cold_restarts"):
            _check_type(name, getattr(self, name), bool, "True or False.")
        for name in ("grace_s", "evaluator_grace_s", "rejoin_after_s"):
            _check_seconds(name, getattr(self, name))
        for name in ("log_dir", "run_dir"):
            if getattr(self, name) is not None:
                expected = "a path, or None for no files."
                _check_type(name, getattr(self, name), str | os.PathLike, expected)
        if self.show not in _SHOWN:
            raise ValueError(
                explain(
                    f"show={self.show!r} names nothing to show.",
                    expected=f"one of {list(_SHOWN)}.",
                    fix='pass "all", or "leader" for the output of the leading task alone.',
                )
            )
        if not self.workers and not self.chief:
            raise ValueError(
                explain(
                    "workers=0 without a chief leaves no task that trains.",
                    expected="at least one worker, or a chief.",
                    fix="pass workers=1.",
                )
            )
        self._check_membership()

    def _check_membership(self) -> None:
        if self.min_workers is None and self.max_workers is None:
            return
        if not (self.min_workers or self.workers) <= self.workers <= self.full_workers:
            raise ValueError(
                explain(
                    f"min_workers={self.min_workers}, workers={self.workers} and "
                    f"max_workers={self.max_workers} do not fit together.",
                    expected="min_workers <= workers <= max_workers.",
                    fix="correct them, or leave out what is to be as workers.",
                )
            )

    def with_workers(self, num_workers: int) -> LaunchOptions:
        """Returns the same for another number of workers, between the least and the most.

        Args:
            num_workers: how many.
        """
        return dataclasses.replace(self, workers=num_workers)

    @property
    def full_workers(self) -> int:
        """How many workers there are to be when all are back."""
        return self.workers if self.max_workers is None else self.max_workers

    @property
    def task_types(self) -> tuple[str, ...]:
        """The type of every task, those that lead first."""
        return (
            *(["chief"] if self.chief else []),
            *(["worker"] * self.workers),
            *(["ps"] * self.ps),
            *(["evaluator"] if self.evaluator else []),
        )


def _check_type(name: str, value: Any, wanted: Any, expected: str) -> None:
    # True is an int to Python, and a mistake here.
    if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
        raise TypeError(
            explain(
                f"{name}={value!r} is of type {type(value).__name__}.",
                expected=expected,
                fix=f"correct {name}.",
            )
        )


def _check_count(name: str, value: Any, least: int) -> None:
    _check_type(name, value, int, "a whole number.")
    if value < least:
        raise ValueError(
            explain(
                f"{name}={value} is too small.",
                expected=f"at least {least}.",
                fix=f"raise {name}, or leave it out.",
            )
        )


def _check_seconds(name: str, value: Any) -> None:
    _check_type(name, value, int | float, "a number of seconds.")
    if math.isnan(value) or value < 0:
        raise ValueError(
            explain(
                f"{name}={value} is no time to wait.",
                expected="0 seconds or more.",
                fix=f"pass {name}=0 not to wait at all.",
            )
        )
