"""What the launcher says at the end of a group of tasks."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

from stratagem.launch.ends import TaskEnd, how_it_ended, last_words

__all__ = ["failure_report", "restart_report", "signal_report"]


def failure_report(
    cause: TaskEnd, ends: Sequence[TaskEnd], *, log_dir: str | os.PathLike[str] | None = None
) -> list[str]:
    """Says which task failed first, why, and what became of the others.

    Args:
        cause: the task that failed first.
        ends: all tasks.
        log_dir: where their output is kept; None if it is not.

    Returns:
        Lines. Those of the task itself are indented.
    """
    words = last_words(cause.lines)
    lines = [f"{cause.name} failed first: {how_it_ended(cause.returncode)}."]
    if words:
        lines += ["Its last lines:", *(f"    {line}" for line in words)]
    others = [end for end in ends if end is not cause]
    for heading, group in (
        ("Failed after it", [end for end in others if end.failed]),
        ("Stopped", [end for end in others if end.was_stopped and not end.failed]),
        ("Had ended", [end for end in others if not end.was_stopped and not end.failed]),
    ):
        if group:
            lines.append(f"{heading}: {_each(group)}.")
    if log_dir is not None:
        lines.append(f"All output: {os.fspath(log_dir)}")
    return lines


def signal_report(signum: int, ends: Sequence[TaskEnd]) -> list[str]:
    """Says what a signal to the launcher has led to.

    Args:
        signum: the signal.
        ends: all tasks.

    Returns:
        Lines.
    """
    return [f"Ended after {signal.Signals(signum).name}: {_each(ends)}."]


def restart_report(restart: int, max_restarts: int) -> list[str]:
    """Says that all tasks are started again.

    Args:
        restart: the number of this restart, from 1.
        max_restarts: how many there may be.

    Returns:
        Lines.
    """
    return [f"Starting all tasks again: restart {restart} of {max_restarts}."]


def _each(ends: Sequence[TaskEnd]) -> str:
    return ", ".join(f"{end.name} ({how_it_ended(end.returncode)})" for end in ends)
