"""Task group: runs all tasks of one start, from the first process to the end of the last."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from types import FrameType, TracebackType
from typing import Any

from stratagem.errors import NOT_NEEDED
from stratagem.launch.options import LaunchOptions
from stratagem.launch.plan import TRAINERS, Node, TaskPlan
from stratagem.launch.prefork.warm_start import WARM_UP_AFTER_S, WarmStart
from stratagem.launch.restart.policy import (
    MAX_SHORT_STARTS,
    SHORT_S,
    RestartCount,
    WorkerRestarts,
    cause_of_failure,
    have_saved_and_left,
    have_survivors,
    tasks_to_kill,
    tasks_to_stop,
)
from stratagem.launch.restart.running_tasks import RunningTask, RunningTasks
from stratagem.launch.tasks.exit_status import ExitStatus, error_lines, failure_lines
from stratagem.launch.tasks.guardian import Guardian
from stratagem.launch.tasks.output import Screen
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

# Signals to the launcher, queued for its loop.

# No task is restarted after one of these.
ENDING = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
_CAUGHT = (*sorted(ENDING), signal.SIGUSR1, signal.SIGUSR2)


class CaughtSignals:
    """Replaces a program's own handlers while its tasks run.

    Only the main thread can have handlers; elsewhere nothing is caught. Signals that this process
    ignores stay ignored, here and in its tasks: `nohup` does that to SIGHUP.
    """

    def __init__(self) -> None:
        self._caught: list[signal.Signals] = []
        self._handlers: dict[signal.Signals, Any] = {}
        self.ending: signal.Signals | None = None

    def __enter__(self) -> CaughtSignals:
        if threading.current_thread() is threading.main_thread():
            for signum in _CAUGHT:
                handler = signal.getsignal(signum)
                # None is a handler set outside Python, which could not be restored.
                if handler not in (None, signal.SIG_IGN):
                    self._handlers[signum] = signal.signal(signum, self._catch)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
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
            self._writer.failure(what, lost=cause.culprit)

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
    return ", ".join(f"{status.name} ({status.how})" for status in statuses)


def run_group(
    plans: Sequence[TaskPlan],
    options: LaunchOptions,
    base: Mapping[str, str],
    *,
    screen: Screen,
    caught: CaughtSignals,
    guardian: Guardian,
    events: LaunchEvents,
    warm: WarmStart | None = None,
    is_notice_due: Callable[[float], bool] | None = None,
    kills_interrupted: bool = False,
    slow: SlowTasks | None = None,
) -> tuple[tuple[ExitStatus, ...], bool]:
    """Starts tasks, shows their output, and returns when none of their processes is left.

    `plans` has the leader first; tasks inherit `base`. `guardian` kills the tasks if this process
    is killed. `warm` forks tasks if possible: several tasks wait until it is ready, for a single
    one it is prepared after a while. `is_notice_due` is called with the seconds since the start;
    True asks the tasks to save and exit. `kills_interrupted` kills tasks that still run `grace_s`
    after a signal to end. `slow` finds the slow tasks to report. Returns the exit statuses, and
    True if the tasks were asked to exit. After an OSError, no task is left.
    """
    running = RunningTasks(options, base, warm, screen, guardian)
    group = _TaskGroup(options, running, screen, caught, events, kills_interrupted, slow)
    with contextlib.closing(running):
        if warm is not None:
            warm.load(plans, lambda: caught.ending is not None)
        for plan in plans:
            running.start(plan, is_leader=plan is plans[0])
        started_s = time.monotonic()
        while not running.is_gone:
            group.step()
            now_s = time.monotonic()
            ran_s = now_s - started_s
            # Since the launch, not this start: tasks that fail early restart often.
            if warm is not None and now_s - warm.made_s >= WARM_UP_AFTER_S:
                warm.prepare(plans[0])
            if is_notice_due is not None and is_notice_due(ran_s):
                group.ask_to_leave()
        return running.statuses, group.were_asked


class _TaskGroup:
    def __init__(
        self,
        options: LaunchOptions,
        running: RunningTasks,
        screen: Screen,
        caught: CaughtSignals,
        events: LaunchEvents,
        kills_interrupted: bool,
        slow: SlowTasks | None,
    ) -> None:
        self._options = options
        self._kills_interrupted, self._slow = kills_interrupted, slow
        self._screen = screen
        self._caught = caught
        self._events = events
        self._running = running
        self._tasks = running.tasks
        self._num_interrupts = 0
        self._reported: list[ExitStatus] = []
        self._restarts = WorkerRestarts(options.max_restarts)  # of workers that others survive
        self._has_reported = False
        self.were_asked = False

    def step(self) -> None:
        self._running.read()
        now_s = time.monotonic()
        for signum in self._caught.take():
            self._forward(signum)
        self._running.update(now_s)
        self._report_slow(now_s)
        self._stop_and_kill(now_s)

    def _note_lost(self, now_s: float) -> None:
        """Reports workers that others have survived, and starts them again."""
        trainers = [task for task in self._tasks if task.process.plan.trains]
        statuses = [task.status for task in trainers]
        num_left = statuses.count(None)
        is_ending = (
            self.were_asked
            or self._caught.ending is not None
            or any(status is not None and not status.failed for status in statuses)
        )
        for task in trainers:
            status = task.status
            if status is None or not status.failed or status.returncode == NOT_NEEDED:
                continue
            if not any(status is one for one in self._reported):
                self._reported.append(status)
                self._screen.say([f"{status.culprit} failed: {status.why}. {num_left} continue."])
                if num_left and not is_ending:
                    self._plan_restart(task, now_s)
        for index in self._restarts.take_due(now_s, self._is_gone) if num_left else []:
            if not is_ending:
                self._restart(index)

    def _is_gone(self, index: int) -> bool:
        return self._tasks[index].process.is_gone

    def _plan_restart(self, task: RunningTask, now_s: float) -> None:
        index = next(place for place, one in enumerate(self._tasks) if one is task)
        text = self._restarts.note_loss(
            index,
            task.process.plan.name,
            ran_s=now_s - task.started_s,
            now_s=now_s,
        )
        if text:
            self._screen.say([text])

    def _restart(self, index: int) -> None:
        plan = self._tasks[index].process.plan
        count = int(plan.variables["STRATAGEM_RESTART_COUNT"]) + 1
        variables = {**plan.variables, "STRATAGEM_RESTART_COUNT": str(count)}
        plan = dataclasses.replace(plan, variables=variables)
        self._running.restart(index, plan)

    def _report_slow(self, now_s: float) -> None:
        if self._slow is None or self.were_asked or self._caught.ending is not None:
            return
        running = {
            task.process.plan.name
            for task in self._tasks
            if task.process.plan.trains and task.status is None and task.stopped_at_s is None
        }
        for one in self._slow.find(now_s, running):
            self._screen.say([f"{one.text}."])

    def ask_to_leave(self) -> None:
        """Asks the tasks once to save and exit, unless they are about to end anyway."""
        trainers = [task for task in self._tasks if task.process.plan.trains]
        is_ending = any(task.status is not None or task.stopped_at_s for task in trainers)
        if self.were_asked or is_ending or self._caught.ending is not None:
            return
        self.were_asked = True
        self._screen.say(["Asking the tasks to save and leave, so that all workers can start."])
        self._events.notice("all workers are to start again")
        for task in self._tasks:
            task.stop()

    def _forward(self, signum: signal.Signals) -> None:
        self._num_interrupts += signum == signal.SIGINT
        is_impatient = signum == signal.SIGINT and self._num_interrupts > 1
        if signum in ENDING:
            self._events.notice(f"{signum.name} to the launcher")
        for task in self._tasks:
            if not task.process.is_gone:
                task.process.send(signal.SIGKILL if is_impatient else signum)
                if signum in ENDING and self._kills_interrupted and task.stopped_at_s is None:
                    task.stopped_at_s = time.monotonic()
        if signum == signal.SIGINT and not is_impatient:
            self._screen.say(["SIGINT: waiting for the tasks to end. Once more kills them."])
        elif signum in ENDING and not is_impatient:
            self._screen.say([f"{signum.name}: waiting for the tasks to end."])

    def _stop_and_kill(self, now_s: float) -> None:
        options = self._options
        states = [task.state for task in self._tasks]
        to_stop = tasks_to_stop(
            states,
            now_s,
            evaluator_grace_s=options.evaluator_grace_s,
            may_survive=options.survivors,
        )
        cause = cause_of_failure(self._running.statuses)
        trainers = [state.status for state in states if state.trains]
        if options.survivors and have_survivors(trainers):
            self._note_lost(now_s)
            cause = None
        others_run = any(states[index].status is None for index in to_stop)
        is_new = others_run and self._caught.ending is None and not self._has_reported
        if cause is not None and is_new:
            self._has_reported = True
            self._events.failure(cause)
            self._screen.say(stop_report(cause, self._running.statuses))
        for index in to_stop:
            task = self._tasks[index]
            if task.status is None and self._caught.ending in task.process.signals:
                task.stopped_at_s = now_s  # another signal would interrupt its orderly end
            else:
                task.stop()
        for index in tasks_to_kill(states, now_s, grace_s=options.grace_s):
            self._tasks[index].process.send(signal.SIGKILL)
