"""All tasks of one start, from the first process to the last one's end."""

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
from stratagem.launch.tasks.exit_status import TaskEnd
from stratagem.launch.tasks.guardian import Guardian
from stratagem.launch.tasks.output.task_output import Screen, TaskOutput
from stratagem.launch.tasks.task_process import TaskProcess

__all__ = ["run_group"]

# How long the end of a process goes unseen if it prints nothing and keeps its pipes open.
_POLL_S = 0.05


@dataclasses.dataclass(kw_only=True)
class _Task:
    process: TaskProcess
    output: TaskOutput
    end: TaskEnd | None = None
    stopped_at_s: float | None = None

    @property
    def state(self) -> TaskState:
        plan = self.process.plan
        return TaskState(
            task_type=plan.task_type,
            trains=plan.trains,
            end=self.end,
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
) -> tuple[tuple[TaskEnd, ...], bool]:
    """Starts tasks, shows what they print, and returns when nothing of them runs any more.

    Args:
        plans: the tasks; the first one leads.
        options: what is shown, and how long a task may take to end.
        base: the variables that they inherit.
        screen: where their lines go.
        caught: signals to pass on.
        guardian: who ends them if this process is killed.
        events: where it is written down.
        warm: forks those tasks that it can. Several wait for it to be ready; for one that starts
            alone it is prepared when that one has run for a while.
        is_notice_due: whether they are to be asked to save and leave, who have run for so many
            seconds; None for never.

    Returns:
        How each ended, and whether they were asked to.

    Raises:
        OSError: a process cannot be started, or a file not be written. All are killed then.
    """
    with contextlib.closing(_Group(options, screen, caught, guardian, events)) as group:
        if warm is not None:
            warm.load(plans, lambda: caught.ending is not None)
        for plan in plans:
            group.start(plan, base, warm)
        started_s = time.monotonic()
        while not group.is_gone:
            group.step()
            now_s = time.monotonic()
            ran_s = now_s - started_s
            # Of the launch, and not of this start: those that fail early are many.
            if warm is not None and now_s - warm.made_s >= WARM_UP_AFTER_S:
                warm.prepare(plans[0])
            if is_notice_due is not None and is_notice_due(ran_s):
                group.ask_to_leave()
        return group.ends, group.were_asked


class _Group:
    def __init__(
        self,
        options: LaunchOptions,
        screen: Screen,
        caught: CaughtSignals,
        guardian: Guardian,
        events: LaunchEvents,
    ) -> None:
        self._options = options
        self._screen = screen
        self._caught = caught
        self._guardian = guardian
        self._events = events
        self._selector = selectors.DefaultSelector()
        self._tasks: list[_Task] = []
        self._num_interrupts = 0
        self._has_said = False
        self.were_asked = False

    @property
    def is_gone(self) -> bool:
        return all(task.process.is_gone for task in self._tasks)

    @property
    def ends(self) -> tuple[TaskEnd, ...]:
        return tuple(task.end for task in self._tasks if task.end is not None)

    def start(self, plan: TaskPlan, base: Mapping[str, str], warm: WarmStart | None) -> None:
        is_shown = self._options.show == "all" or not self._tasks
        output = TaskOutput(plan, self._screen if is_shown else None, self._options.log_dir)
        with contextlib.ExitStack() as on_error:
            on_error.callback(output.close)
            process = TaskProcess(plan, base, warm)
            on_error.pop_all()
        task = _Task(process=process, output=output)
        self._tasks.append(task)
        self._guardian.watch(process.group)
        for place, stream in enumerate(process.streams):
            self._selector.register(stream, selectors.EVENT_READ, (task, place))

    def step(self) -> None:
        for key, _ in self._selector.select(_POLL_S):
            task, place = key.data
            data = task.process.read(key.fileobj)
            if data:
                task.output.take(data, time.monotonic(), stream=place)
            elif data is not None:
                self._selector.unregister(key.fileobj)
        now_s = time.monotonic()
        for signum in self._caught.take():
            self._forward(signum)
        for task in self._tasks:
            self._look_at(task, now_s)
            task.output.show_overdue(now_s)
        self._carry_out(now_s)

    def ask_to_leave(self) -> None:
        """Gives the tasks notice, once, unless they are about to end anyway."""
        trainers = [task for task in self._tasks if task.process.plan.trains]
        is_ending = any(task.end is not None or task.stopped_at_s for task in trainers)
        if self.were_asked or is_ending or self._caught.ending is not None:
            return
        self.were_asked = True
        self._screen.say(["Asking the tasks to save and leave, so that all workers can start."])
        self._events.notice("all workers are to start again")
        for task in self._tasks:
            task.process.send(signal.SIGTERM)
            task.stopped_at_s = time.monotonic()

    def close(self) -> None:
        """Whatever has gone wrong, no process stays."""
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
        if signum == signal.SIGINT and not is_impatient:
            self._screen.say(["SIGINT: waiting for the tasks to end. Once more kills them."])
        elif signum in ENDING and not is_impatient:
            self._screen.say([f"{signum.name}: waiting for the tasks to end."])

    def _look_at(self, task: _Task, now_s: float) -> None:
        process = task.process
        if process.is_gone:
            return
        returncode = process.returncode()
        if returncode is None:
            return
        if task.end is None:
            self._show_rest(task, now_s)
            task.end = TaskEnd(
                name=process.plan.name,
                returncode=returncode,
                at_s=now_s,
                was_stopped=task.stopped_at_s is not None or self._is_no_more_needed(process.plan),
                signals=frozenset(process.signals),
                lines=task.output.last_lines(),
                was_shown=task.output.is_shown,
            )
        if process.look_for_members():
            self._show_rest(task, now_s)
            self._guardian.forget(process.group)

    def _show_rest(self, task: _Task, now_s: float) -> None:
        for place, stream in enumerate(task.process.streams):
            task.output.take(task.process.read_all(stream), now_s, stream=place)
        task.output.show_rest(now_s)

    def _is_no_more_needed(self, plan: TaskPlan) -> bool:
        """A server that is left alone may fail before it is told to end."""
        trainers = [task.end for task in self._tasks if task.process.plan.trains]
        done = all(end is not None and not end.failed for end in trainers)
        return plan.task_type == "ps" and done

    def _carry_out(self, now_s: float) -> None:
        options = self._options
        states = [task.state for task in self._tasks]
        to_stop = tasks_to_stop(states, now_s, evaluator_grace_s=options.evaluator_grace_s)
        cause = cause_of_failure(self.ends)
        others_run = any(states[place].end is None for place in to_stop)
        if cause is not None and others_run and self._caught.ending is None and not self._has_said:
            self._has_said = True
            self._events.failure(cause)
            self._screen.say(stop_report(cause, self.ends))
        for place in to_stop:
            self._tasks[place].process.send(signal.SIGTERM)
            self._tasks[place].stopped_at_s = now_s
        for place in tasks_to_kill(states, now_s, grace_s=options.grace_s):
            self._tasks[place].process.send(signal.SIGKILL)
