"""What functions of the tests share with them: workers are threads of this process."""

from __future__ import annotations

import threading
from typing import Any

LIMIT_S = 60.0

started = threading.Semaphore(0)
go_on = threading.Event()
seen: list[Any] = []
_meeting = threading.Barrier(3)


def forget() -> None:
    """Begins anew."""
    seen.clear()
    go_on.clear()
    while started.acquire(blocking=False):
        pass


def wait_to_go_on(value: Any = None) -> Any:
    """Runs until the test lets it go on."""
    started.release()
    assert go_on.wait(LIMIT_S)
    return value


def fail_together(text: str) -> None:
    """Fails on three workers, after all of them have begun."""
    _meeting.wait(LIMIT_S)
    raise LookupError(text)


def fail(text: str = "on purpose") -> None:
    raise ArithmeticError(text)


def note(value: Any) -> Any:
    seen.append(value)
    return value


def times_seen(value: Any) -> int:
    return seen.count(value)


def ten_more(other: int) -> int:
    return other + 10
