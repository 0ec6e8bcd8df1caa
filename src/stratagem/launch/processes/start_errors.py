"""Errors of servers and workers that fail to start or restart."""

from __future__ import annotations

import logging

from stratagem import logs
from stratagem.errors import DeadlineExceededError, UnavailableError
from stratagem.messages import explain

_logger = logging.getLogger(__name__)


def announce_failed_restart(name: str, error: Exception, delay_s: float) -> None:
    """Prints why a process such as "ps 0" did not start again; a later start may succeed."""
    logs.announce(_logger, f"{name} did not start again; next try in {delay_s:g} s. {error}")


def cannot_start(name: str, error: BaseException) -> RuntimeError:
    """Returns the error of a process such as "ps 0" whose imports or function fail."""
    return RuntimeError(
        explain(
            f"{name} cannot start: {error}",
            expected="a process that imports and starts without an error.",
            fix="fix the error in the last lines of the traceback, which is from that process.",
            code="SG601",
        )
    )


def died_at_start(name: str, error: BaseException) -> UnavailableError:
    """Returns the error of a process that ends before it serves."""
    return UnavailableError(
        explain(
            f"{name} died while starting: {error}",
            expected="a process that keeps running.",
            fix="check its last output, and whether its machine has enough memory.",
            code="SG601",
        )
    )


def lost_too_often(name: str, how: object) -> UnavailableError:
    """Returns the error of a process that has ended once more than `max_restarts`."""
    return UnavailableError(
        explain(
            f"{name} ended and has no restarts left: {how}",
            expected="a process that keeps running.",
            fix="check its last output, or raise max_restarts.",
            code="SG602",
        )
    )


def not_started(
    names: list[str], count: int, limit_s: float, *, expected: str, look_at: str
) -> DeadlineExceededError:
    """Returns the error of processes, out of `count`, that have not started in time."""
    return DeadlineExceededError(
        explain(
            f"{len(names)} of {count} processes did not start within {limit_s:g} s: "
            f"{', '.join(names)}.",
            expected=expected,
            fix=f"{look_at}; set STRATAGEM_JOIN_TIMEOUT_S to wait longer.",
            code="SG601",
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
    """Returns the error of a `ClusterCoordinator` created by an independent worker."""
    return RuntimeError(
        explain(
            "A ClusterCoordinator was created in a worker that runs its own program.",
            expected="strategy.run or fit in this program.",
            fix="omit independent=True if one process coordinates the others.",
            code="SG511",
        )
    )
