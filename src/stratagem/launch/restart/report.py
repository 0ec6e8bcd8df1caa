"""Messages of the launcher about failures, signals and restarts."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

from stratagem.launch.restart.policy import have_saved_and_left
from stratagem.launch.restart.restart_count import MAX_SHORT_STARTS, SHORT_S, RestartCount
from stratagem.launch.tasks.exit_status import ExitStatus
from stratagem.launch.tasks.output.tracebacks import error_lines, failure_lines


def failure_report(
    cause: ExitStatus,
    statuses: Sequence[ExitStatus],
    *,
    log_dir: str | os.PathLike[str] | None = None,
) -> list[str]:
    """Returns lines that name the task that failed first, why, and how the others ended."""
    # Frames that are already on the screen are not repeated.
    last_lines = error_lines(cause.lines) if cause.was_shown else failure_lines(cause.lines)
    lines = [f"{cause.culprit} failed first: {cause.why}."]
    if last_lines:
        whose = "Its last lines" if cause.lost_peer is None else f"Last lines of {cause.title}"
        lines += [f"{whose}:", *(f"    {line}" for line in last_lines)]
    others = [status for status in statuses if status is not cause]
    for heading, group in (
        ("Failed after it", [one for one in others if one.failed]),
        ("Stopped", [one for one in others if one.was_stopped and not one.failed]),
        ("Had ended", [one for one in others if not one.was_stopped and not one.failed]),
    ):
        if group:
            lines.append(f"{heading}: {_each(group)}.")
    if log_dir is not None:
        lines.append(f"All output: {os.fspath(log_dir)}")
    return lines


def end_summary(cause: ExitStatus | None, signum: signal.Signals | None) -> str:
    """Returns the end of a job in one line, for its other nodes."""
    if signum is not None:
        return signum.name
    return "all workers are done" if cause is None else f"{cause.culprit} failed first: {cause.why}"


def signal_report(signum: int, statuses: Sequence[ExitStatus]) -> list[str]:
    """Returns lines about the end of all tasks after a signal to the launcher."""
    return [f"Ended after {signal.Signals(signum).name}: {_each(statuses)}."]


def stop_report(cause: ExitStatus, statuses: Sequence[ExitStatus]) -> list[str]:
    """Returns lines that say why the remaining tasks are stopped."""
    if (peer := cause.lost_peer) is not None:
        reason = f"{peer.name} {peer.how}, and so {cause.title} failed"
        return [f"{reason} ({cause.how}): stopping the others."]
    verb = "saved and left after notice" if have_saved_and_left(statuses) else "failed"
    return [f"{cause.title} {verb} ({cause.how}): stopping the others."]


def notice_report(statuses: Sequence[ExitStatus], after: RestartCount | None) -> list[str]:
    """Returns lines about tasks that saved and exited; `after` is None if none restarts."""
    lines = [f"Saved and left after notice: {_each(statuses)}."]
    if after is None or after.short_starts >= MAX_SHORT_STARTS:
        lines.append(
            f"This happened within {SHORT_S:g} s of the start {MAX_SHORT_STARTS} times or more in "
            "a row, so it counts as a failure."
        )
    return lines


def restart_report(before: RestartCount, after: RestartCount, max_restarts: int) -> list[str]:
    """Returns lines about the restart of all tasks."""
    if after.failures == before.failures:
        return ["Starting all tasks again; this does not count as a failure."]
    return [f"Starting all tasks again: restart {after.failures} of {max_restarts}."]


def _each(statuses: Sequence[ExitStatus]) -> str:
    return ", ".join(f"{status.title} ({status.how})" for status in statuses)
