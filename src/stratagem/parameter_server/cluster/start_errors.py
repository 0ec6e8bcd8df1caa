"""Errors of a server or a worker that does not start, or is not started again."""

from __future__ import annotations

from stratagem.errors import DeadlineExceededError, UnavailableError
from stratagem.messages import explain

__all__ = [
    "cannot_start",
    "died_at_start",
    "lost_too_often",
    "not_started",
    "not_the_coordinator",
    "watched_twice",
]


def cannot_start(name: str, error: BaseException) -> RuntimeError:
    """Returns the error of a process such as "ps 0" whose imports or function fail."""
    return RuntimeError(
        explain(
            f"{name} cannot start: {error}",
            expected="a process that imports and starts without an error.",
            fix="look at the last lines of that traceback, which is the process's own.",
        )
    )


def died_at_start(name: str, error: BaseException) -> UnavailableError:
    """Returns the error of a process that ends before it serves."""
    return UnavailableError(
        explain(
            f"{name} died while it started: {error}",
            expected="a process that lives.",
            fix="look at what it printed last, and whether its machine has the memory.",
        )
    )


def lost_too_often(name: str, how: object) -> UnavailableError:
    """Returns the error of a process that has ended once more than `max_restarts`."""
    return UnavailableError(
        explain(
            f"{name} was lost more often than it may be: {how}",
            expected="a process that lives.",
            fix="look at what it printed last; a larger max_restarts allows more.",
        )
    )


def not_started(
    names: list[str], count: int, limit_s: float, *, expected: str, look_at: str
) -> DeadlineExceededError:
    """Returns the error of processes, out of `count`, that have not started in time."""
    return DeadlineExceededError(
        explain(
            f"{len(names)} of {count} processes have not started for {limit_s:g} s: "
            f"{', '.join(names)}.",
            expected=expected,
            fix=f"{look_at}; STRATAGEM_JOIN_TIMEOUT_S changes the limit.",
        )
    )


def watched_twice(kind: str) -> RuntimeError:
    """Returns the error of a second call of `watch`."""
    return RuntimeError(
        explain(
            f"watch() was called twice for processes of kind {kind!r}.",
            expected="one call of watch().",
            fix="pass callbacks that notify every listener.",
        )
    )


def not_the_coordinator() -> RuntimeError:
    """Error of a `ClusterCoordinator` that an independent worker creates."""
    return RuntimeError(
        explain(
            "A ClusterCoordinator was made in a worker that runs a program of its own.",
            expected="strategy.run, or fit, in this program.",
            fix="leave independent=True out if one process coordinates the others.",
        )
    )
