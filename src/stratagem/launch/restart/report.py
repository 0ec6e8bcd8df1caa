"""What the launcher says at the end of a group of tasks."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

from stratagem.launch.restart.policy import have_saved_and_left
from stratagem.launch.restart.restart_count import MAX_SHORT_STARTS, SHORT_S, Restarts
from stratagem.launch.tasks.exit_status import TaskEnd, error_words, how_it_ended, last_words

__all__ = ["failure_report", "notice_report", "restart_report", "signal_report", "stop_report"]


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
    # Frames that are on the screen already would be there twice.
    words = error_words(cause.lines) if cause.was_shown else last_words(cause.lines)
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


def stop_report(cause: TaskEnd, ends: Sequence[TaskEnd]) -> list[str]:
    """Says why the tasks that still run are stopped.

    Args:
        cause: the task that ended first.
        ends: those that have ended.

    Returns:
        Lines.
    """
    what = "saved and left after notice" if have_saved_and_left(ends) else "failed"
    how = how_it_ended(cause.returncode)
    return [f"{cause.name} {what} ({how}): stopping the others."]


def notice_report(ends: Sequence[TaskEnd], after: Restarts | None) -> list[str]:
    """Says that the tasks have saved their state and left, to be started again.

    Args:
        ends: all tasks.
        after: the count with the next start; None if there is none.

    Returns:
        Lines.
    """
    lines = [f"Saved and left after notice: {_each(ends)}."]
    if after is None or after.short_starts >= MAX_SHORT_STARTS:
        lines.append(
            f"That was within {SHORT_S:g} s of the start, {MAX_SHORT_STARTS} times or more in a "
            "row: it counts as a failure."
        )
    return lines


def restart_report(before: Restarts, after: Restarts, max_restarts: int) -> list[str]:
    """Says that all tasks are started again.

    Args:
        before: the count without this start.
        after: the count with it.
        max_restarts: how often after a failure.

    Returns:
        Lines.
    """
    if after.failures == before.failures:
        return ["Starting all tasks again; it counts as no failure."]
    return [f"Starting all tasks again: restart {after.failures} of {max_restarts}."]


def _each(ends: Sequence[TaskEnd]) -> str:
    return ", ".join(f"{end.name} ({how_it_ended(end.returncode)})" for end in ends)
