"""Task group: runs all tasks of one start, from the first process to the end of the last."""

from __future__ import annotations

import contextlib
import dataclasses
import selectors
import signal
import time
from collections.abc import Callable, Mapping, Sequence

from stratagem.launch.plan.options import LaunchOptions
from stratagem.launch.plan.task_plan import TaskPlan
from stratagem.launch.prefork.warm_start import WARM_UP_AFTER_S, WarmStart
from stratagem.launch.restart.launch_events import LaunchEvents
from stratagem.launch.restart.policy import (
    TaskState,
    cause_of_failure,
    tasks_to_kill,
    tasks_to_stop,
)
from stratagem.launch.restart.report import stop_report
from stratagem.launch.restart.signals import ENDING, CaughtSignals
from stratagem.launch.tasks.exit_status import ExitStatus
from stratagem.launch.tasks.guardian import Guardian
from stratagem.launch.tasks.output.screen import Screen
from stratagem.launch.tasks.output.task_output import TaskOutput
from stratagem.launch.tasks.task_process import TaskProcess

__all__ = ["run_group"]

# Delay until the end of a process is noticed if it prints nothing and keeps its pipes open.
_POLL_S = 0.05


@dataclasses.dataclass(kw_only=True)
class _RunningTask:
    process: TaskProcess
    output: TaskOutput
    status: ExitStatus | None = None
    stopped_at_s: float | None = None

    @property
    def state(self) -> TaskState:
        plan = self.process.plan
        return TaskState(
            task_type=plan.task_type,
            trains=plan.trains,
            status=self.status,
            is_gone=self.process.is_gone,
            stopped_at_s=self.stopped_at_s,
        )


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
) -> tuple[tuple[ExitStatus, ...], bool]:
    """Starts tasks, shows their output, and returns when none of their processes is left.

    `plans` has the leader first; tasks inherit `base`. `guardian` kills the tasks if this process
    is killed. `warm` forks tasks if possible: several tasks wait until it is ready, for a single
    one it is prepared after a while. `is_notice_due` is called with the seconds since the start;
    True asks the tasks to save and exit. `kills_interrupted` kills tasks that still run `grace_s`
    after a signal to end. Returns the exit statuses, and True if the tasks were
    asked to exit. After an OSError, no task is left.
    """
    made = _TaskGroup(options, screen, caught, guardian, events, kills_interrupted)
    with contextlib.closing(made) as group:
        if warm is not None:
            warm.load(plans, lambda: caught.ending is not None)
        for plan in plans:
            group.start(plan, base, warm)
        started_s = time.monotonic()
        while not group.is_gone:
            group.step()
            now_s = time.monotonic()
            ran_s = now_s - started_s
            # Since the launch, not this start: tasks that fail early restart often.
            if warm is not None and now_s - warm.made_s >= WARM_UP_AFTER_S:
                warm.prepare(plans[0])
            if is_notice_due is not None and is_notice_due(ran_s):
                group.ask_to_leave()
        return group.statuses, group.were_asked


class _TaskGroup:
    def __init__(
        self,
        options: LaunchOptions,
        screen: Screen,
        caught: CaughtSignals,
        guardian: Guardian,
        events: LaunchEvents,
        kills_interrupted: bool,
    ) -> None:
        self._options = options
        self._kills_interrupted = kills_interrupted
        self._screen = screen
        self._caught = caught
        self._guardian = guardian
        self._events = events
        self._selector = selectors.DefaultSelector()
        self._tasks: list[_RunningTask] = []
        self._num_interrupts = 0
        self._has_reported = False
        self.were_asked = False

    @property
    def is_gone(self) -> bool:
        return all(task.process.is_gone for task in self._tasks)

    @property
    def statuses(self) -> tuple[ExitStatus, ...]:
        return tuple(task.status for task in self._tasks if task.status is not None)

    def start(self, plan: TaskPlan, base: Mapping[str, str], warm: WarmStart | None) -> None:
        is_shown = self._options.show == "all" or not self._tasks
        output = TaskOutput(plan, self._screen if is_shown else None, self._options.log_dir)
        with contextlib.ExitStack() as on_error:
            on_error.callback(output.close)
            process = TaskProcess(plan, base, warm)
            on_error.pop_all()
        task = _RunningTask(process=process, output=output)
        self._tasks.append(task)
        self._guardian.watch(process.group)
        for index, stream in enumerate(process.streams):
            self._selector.register(stream, selectors.EVENT_READ, (task, index))

    def step(self) -> None:
        for key, _ in self._selector.select(_POLL_S):
            task, index = key.data
            data = task.process.read(key.fileobj)
            if data:
                task.output.take(data, time.monotonic(), stream=index)
            elif data is not None:
                self._selector.unregister(key.fileobj)
        now_s = time.monotonic()
        for signum in self._caught.take():
            self._forward(signum)
        for task in self._tasks:
            self._update(task, now_s)
            task.output.show_overdue(now_s)
        self._stop_and_kill(now_s)

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
            task.process.send(signal.SIGTERM)
            task.stopped_at_s = time.monotonic()

    def close(self) -> None:
        """Kills all remaining processes, even after an error."""
        for task in self._tasks:
            if not task.process.is_gone:
                task.process.send(signal.SIGKILL)
                task.process.wait()
                self._guardian.forget(task.process.group)
            task.process.close()
            task.output.close()
        self._selector.close()

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

    def _update(self, task: _RunningTask, now_s: float) -> None:
        process = task.process
        if process.is_gone:
            return
        returncode = process.returncode()
        if returncode is None:
            return
        if task.status is None:
            self._show_rest(task, now_s)
            task.status = ExitStatus(
                name=process.plan.name,
                returncode=returncode,
                at_s=now_s,
                was_stopped=task.stopped_at_s is not None or self._is_idle_server(process.plan),
                signals=frozenset(process.signals),
                lines=task.output.last_lines(),
                was_shown=task.output.is_shown,
            )
        if process.look_for_members():
            self._show_rest(task, now_s)
            self._guardian.forget(process.group)

    def _show_rest(self, task: _RunningTask, now_s: float) -> None:
        for index, stream in enumerate(task.process.streams):
            task.output.take(task.process.read_all(stream), now_s, stream=index)
        task.output.show_rest(now_s)

    def _is_idle_server(self, plan: TaskPlan) -> bool:
        """Returns True for a server whose workers are done: it may fail before it is stopped."""
        trainers = [task.status for task in self._tasks if task.process.plan.trains]
        is_done = all(status is not None and not status.failed for status in trainers)
        return plan.task_type == "ps" and is_done

    def _stop_and_kill(self, now_s: float) -> None:
        options = self._options
        states = [task.state for task in self._tasks]
        to_stop = tasks_to_stop(states, now_s, evaluator_grace_s=options.evaluator_grace_s)
        cause = cause_of_failure(self.statuses)
        others_run = any(states[index].status is None for index in to_stop)
        is_new = others_run and self._caught.ending is None and not self._has_reported
        if cause is not None and is_new:
            self._has_reported = True
            self._events.failure(cause)
            self._screen.say(stop_report(cause, self.statuses))
        for index in to_stop:
            self._tasks[index].process.send(signal.SIGTERM)
            self._tasks[index].stopped_at_s = now_s
        for index in tasks_to_kill(states, now_s, grace_s=options.grace_s):
            self._tasks[index].process.send(signal.SIGKILL)
