"""Functions that tasks call in the tests of `spawn`."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any


class UnsendableError(Exception):
    """It can be pickled, and not be made again."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first + second)


def own_task() -> dict[str, Any]:
    return json.loads(os.environ["TF_CONFIG"])["task"]


def place(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
    if own_task()["type"] == "ps":
        time.sleep(1000)
    return own_task()["type"], own_task()["index"], args, kwargs, os.getpid()


def fail_in_worker_1(kind: str) -> None:
    if own_task()["index"] != 1:
        time.sleep(1000)
    if kind == "exception":
        raise LookupError("no such example", 7)
    if kind == "unsendable":
        raise UnsendableError("a", "b")
    if kind == "exit":
        raise SystemExit(3)
    os.kill(os.getpid(), signal.SIGKILL)


def unsendable_value() -> Any:
    return lambda: None


def leave_well() -> None:
    raise SystemExit(0)


def succeed_at_restart(number: int) -> int:
    attempt = int(os.environ["STRATAGEM_RESTART_COUNT"])
    if attempt < number and own_task()["index"] == 0:
        raise ValueError(f"attempt {attempt}")
    return attempt


def raise_and_then_die() -> None:
    if os.environ["STRATAGEM_RESTART_COUNT"] == "0":
        raise ValueError("at first")
    os.kill(os.getpid(), signal.SIGKILL)


def loaded(*names: str) -> list[str]:
    return sorted(set(names) & set(sys.modules))
