"""Signals to a launcher, and its reports: events of the run, slow tasks, messages."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Collection, Sequence
from types import FrameType, TracebackType
from typing import Any

from stratagem.launch.options import LaunchOptions
from stratagem.launch.plan import TRAINERS, Node
from stratagem.launch.restart.policy import (
    MAX_SHORT_STARTS,
    SHORT_S,
    RestartCount,
    have_saved_and_left,
)
from stratagem.launch.tasks.exit_status import ExitStatus, error_lines, failure_lines
from stratagem.observe.events import RunFollower
from stratagem.observe.stragglers import (
    MIN_STEPS,
    WINDOW_S,
    Line,
    SettledLines,
    Straggler,
    find_stragglers,
    times_of,
)
from stratagem.observe.writer import EventWriter
from stratagem.resources import Closing

# Signals to the launcher, queued for its loop.

# No task is restarted after one of these.
ENDING = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
_CAUGHT = (*sorted(ENDING), signal.SIGUSR1, signal.SIGUSR2)


class CaughtSignals(Closing):
    """Replaces a program's own handlers until it is closed, while tasks run.

    Only the main thread can have handlers; elsewhere nothing is caught. Signals that this process
    ignores stay ignored, here and in its tasks: `nohup` does that to SIGHUP.
    """

    def __init__(self) -> None:
        self._caught: list[signal.Signals] = []
        self._handlers: dict[signal.Signals, Any] = {}
        self.ending: signal.Signals | None = None
        if threading.current_thread() is threading.main_thread():
            for signum in _CAUGHT:
                handler = signal.getsignal(signum)
                # None is a handler set outside Python, which could not be restored.
                if handler not in (None, signal.SIG_IGN):
                    self._handlers[signum] = signal.signal(signum, self._catch)

    def close(self) -> None:
        """Restores the handlers."""
        for signum, handler in self._handlers.items():
            signal.signal(signum, handler)

    def take(self) -> list[signal.Signals]:
        """Returns the signals received since the last call, in order."""
        taken: list[signal.Signals] = []
        # One at a time: another may arrive meanwhile.
        while self._caught:
            taken.append(self._caught.pop(0))
        return taken

    def _catch(self, signum: int, frame: FrameType | None) -> None:
        self._caught.append(signal.Signals(signum))
        if signum in ENDING and self.ending is None:
            self.ending = signal.Signals(signum)


# Launcher's events in the folder of a run: failures, notices, restarts and the end.


class LaunchEvents:
    """Records events of the launcher. Only node 0 does, and only if the run has a folder."""

    def __init__(self, options: LaunchOptions, node: Node | None = None) -> None:
        self._writer: EventWriter | None = None
        self._has_failed = False
        if options.run_dir is not None and (node is None or node.rank == 0):
            num_processes = sum(task_type in TRAINERS for task_type in options.task_types)
            num_processes *= 1 if node is None else node.count
            self._writer = EventWriter(options.run_dir, "launcher", 0, num_processes=num_processes)

    def __enter__(self) -> LaunchEvents:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._writer is not None:
            if error is not None:
                self._writer.end(1, repr(error))
            self._writer.close()

    def failure(self, cause: ExitStatus) -> None:
        """Records the task that failed first, once per start; `restart` records saved exits."""
        if self._writer is not None and not self._has_failed and not have_saved_and_left([cause]):
            self._has_failed = True
            what = f"{cause.culprit} failed first: {cause.why}"
            peer = cause.lost_peer
            step, reported_by = (None, None) if peer is None else (peer.step, peer.reported_by)
            self._writer.failure(what, lost=cause.culprit, step=step, reported_by=reported_by)

    def notice(self, reason: str) -> None:
        """Records that all tasks have been asked to end."""
        if self._writer is not None:
            self._writer.notice(reason)

    def restart(self, restart: int, cause: ExitStatus | None) -> None:
        """Records a restart of all tasks; `cause` is None if the launcher asked for it."""
        self._has_failed = False
        if self._writer is not None and cause is None:
            self._writer.restart(restart, "all workers start again")
        elif self._writer is not None and cause is not None:
            verb = "saved and left" if have_saved_and_left([cause]) else "failed"
            self._writer.restart(restart, f"{cause.culprit} {verb} ({cause.why})")

    def end(self, code: int) -> None:
        """Records the exit code of the launcher."""
        if self._writer is not None:
            self._writer.end(code)


# Slow tasks, from the events that the tasks write.

_POLL_EVERY_S = 2.0


class SlowTasks:
    """Follows the step events of the tasks, a window of time after the other.

    Times are of `time.monotonic`. Events are released once they are read.
    """

    def __init__(self, run_dir: str | os.PathLike[str]) -> None:
        self._follower = RunFollower(run_dir, retains_events=False)
        self.begin(0.0)

    def begin(self, now_s: float) -> None:
        """Begins with new processes: what was found about the earlier ones counts no more."""
        self._follower.poll()  # of an earlier start
        self._settled = SettledLines()
        self._lines: list[Line] = []
        self._begun_s = self._polled_s = now_s
        self._slow: set[str] = set()  # in the last window
        self._said: set[str] = set()

    def find(self, now_s: float, running: Collection[str]) -> list[Straggler]:
        """Returns the slow tasks to report now, among those that run."""
        if now_s - self._polled_s < _POLL_EVERY_S:
            return []
        self._polled_s = now_s
        for news in self._follower.poll():
            self._lines += self._settled.pick(news)
        if now_s - self._begun_s < WINDOW_S:
            return []
        times = times_of(line for line in self._lines if line[0] in running)
        if max((one.num_steps for one in times.values()), default=0) < MIN_STEPS:
            return []
        self._lines, self._begun_s = [], now_s
        found = find_stragglers(times)
        slow = {one.task for one in found}
        # A task that is slow for a single window is not worth a message.
        new = (slow & self._slow) - self._said
        self._slow, self._said = slow, (self._said & slow) | new
        return [one for one in found if one.task in new]


# Messages of the launcher about failures, signals and restarts.


def failure_report(
    cause: ExitStatus,
    statuses: Sequence[ExitStatus],
    *,
    log_dir: str | os.PathLike[str] | None = None,
) -> list[str]:
    """Returns lines that name the task that failed first, why, and how the others ended."""
    # Frames that are already on the screen are not repeated.
    last_lines = failure_lines(cause.lines)
    if cause.was_shown:
        last_lines = error_lines(cause.lines, cause.lost_peer)
    lines = [f"{cause.culprit} failed first: {cause.why}."]
    if last_lines:
        whose = "Its last lines" if cause.lost_peer is None else f"Last lines of {cause.name}"
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


def signal_report(signum: int, statuses: Sequence[ExitStatus]) -> list[str]:
    """Returns lines about the end of all tasks after a signal to the launcher."""
    return [f"Ended after {signal.Signals(signum).name}: {_each(statuses)}."]


def stop_report(cause: ExitStatus, statuses: Sequence[ExitStatus]) -> list[str]:
    """Returns lines that say why the remaining tasks are stopped."""
    if (peer := cause.lost_peer) is not None:
        reason = f"{peer.task} {peer.how}, and so {cause.name} failed"
        return [f"{reason} ({cause.how}): stopping the others."]
    verb = "saved and left after notice" if have_saved_and_left(statuses) else "failed"
    return [f"{cause.name} {verb} ({cause.how}): stopping the others."]


def notice_report(
    statuses: Sequence[ExitStatus],
    before: RestartCount,
    after: RestartCount | None,
    max_preemptions: int | None = None,
) -> list[str]:
    """Returns lines about tasks that saved and exited; `after` is None if none restarts."""
    lines = [f"Saved and left after notice: {_each(statuses)}."]
    if after is None and max_preemptions is not None and before.preemptions >= max_preemptions:
        lines.append(f"No restart after a preemption is left, of {max_preemptions}.")
    elif after is None or after.short_starts >= MAX_SHORT_STARTS:
        lines.append(
            f"This happened within {SHORT_S:g} s of the start {MAX_SHORT_STARTS} times or more in "
            "a row, so it counts as a failure."
        )
    return lines


def restart_report(before: RestartCount, after: RestartCount, options: LaunchOptions) -> list[str]:
    """Returns lines about the restart of all tasks."""
    if after.failures > before.failures:
        return [f"Starting all tasks again: restart {after.failures} of {options.max_restarts}."]
    most = options.max_preemptions
    if most is not None and after.preemptions > before.preemptions:
        return [f"Starting all tasks again: preemption {after.preemptions} of {most}."]
    return ["Starting all tasks again; this does not count as a failure."]


def _each(statuses: Sequence[ExitStatus]) -> str:
    return ", ".join(f"{status.name} ({status.how})" for status in statuses)
