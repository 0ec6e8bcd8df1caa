"""Task group: runs all tasks of one start, from the first process to the end of the last."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from stratagem.exit_codes import NOT_NEEDED
from stratagem.launch.plan.options import LaunchOptions
from stratagem.launch.plan.task_plan import TaskPlan
from stratagem.launch.prefork.warm_start import WARM_UP_AFTER_S, WarmStart
from stratagem.launch.restart.launch_events import LaunchEvents
from stratagem.launch.restart.policy import (
    cause_of_failure,
    have_survivors,
    tasks_to_kill,
    tasks_to_stop,
)
from stratagem.launch.restart.report import stop_report
from stratagem.launch.restart.running_tasks import RunningTask, RunningTasks
from stratagem.launch.restart.signals import ENDING, CaughtSignals
from stratagem.launch.restart.slow_tasks import SlowTasks
from stratagem.launch.restart.worker_restarts import WorkerRestarts
from stratagem.launch.tasks.exit_status import ExitStatus
from stratagem.launch.tasks.guardian import Guardian
from stratagem.launch.tasks.output.screen import Screen


class OtherNodes(Protocol):
    """Tasks that other nodes have been asked to start."""

    def running_task(self, plan: TaskPlan) -> RunningTask | None:
        """Returns the task on its node, or None for a task of this machine."""
        ...


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
    nodes: OtherNodes | None = None,
    slow: SlowTasks | None = None,
) -> tuple[tuple[ExitStatus, ...], bool]:
    """Starts tasks, shows their output, and returns when none of their processes is left.

    `plans` has the leader first; tasks inherit `base`. `guardian` kills the tasks if this process
    is killed. `warm` forks tasks if possible: several tasks wait until it is ready, for a single
    one it is prepared after a while. `is_notice_due` is called with the seconds since the start;
    True asks the tasks to save and exit. `kills_interrupted` kills tasks that still run `grace_s`
    after a signal to end. `nodes` has the tasks of other nodes, and `slow` reports slow tasks and
    chooses those to end. Returns the exit statuses, and True
    if the tasks were asked to exit. After an OSError, no task is left.
    """
    made = _TaskGroup(options, screen, caught, guardian, events, kills_interrupted, slow)
    made.restarts_with(base, warm if nodes is None else None, is_alone=nodes is None)
    with contextlib.closing(made) as group:
        if warm is not None:
            warm.load(plans, lambda: caught.ending is not None)
        for plan in plans:
            group.start(plan, base, warm, nodes)
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
        slow: SlowTasks | None,
    ) -> None:
        self._options = options
        self._kills_interrupted, self._slow = kills_interrupted, slow
        self._screen = screen
        self._caught = caught
        self._events = events
        self._running = RunningTasks(options, screen, guardian)
        self._tasks = self._running.tasks
        self._num_interrupts = 0
        self._reported: list[ExitStatus] = []
        self._restarts = WorkerRestarts(0)
        self._base: Mapping[str, str] = {}
        self._warm: WarmStart | None = None
        self._has_reported = False
        self.were_asked = False

    @property
    def is_gone(self) -> bool:
        return self._running.is_gone

    @property
    def statuses(self) -> tuple[ExitStatus, ...]:
        return self._running.statuses

    def start(
        self,
        plan: TaskPlan,
        base: Mapping[str, str],
        warm: WarmStart | None,
        nodes: OtherNodes | None,
    ) -> None:
        task = None if nodes is None else nodes.running_task(plan)
        if task is None:
            self._running.start(plan, base, warm, is_leader=not self._tasks)
        else:
            self._tasks.append(task)

    def step(self) -> None:
        self._running.read()
        now_s = time.monotonic()
        for signum in self._caught.take():
            self._forward(signum)
        self._running.update(now_s)
        self._report_slow(now_s)
        self._stop_and_kill(now_s)

    def restarts_with(
        self, base: Mapping[str, str], warm: WarmStart | None, *, is_alone: bool
    ) -> None:
        """Allows restarts of workers that others have survived; of other nodes, none."""
        self._base, self._warm = base, warm
        if self._options.may_survive and is_alone:
            self._restarts = WorkerRestarts(self._options.max_restarts)

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
            was_slow=bool(task.evicted_for),
        )
        if text:
            self._screen.say([text])

    def _restart(self, index: int) -> None:
        plan = self._tasks[index].process.plan
        count = int(plan.variables["STRATAGEM_RESTART_COUNT"]) + 1
        variables = {**plan.variables, "STRATAGEM_RESTART_COUNT": str(count)}
        plan = dataclasses.replace(plan, variables=variables)
        self._running.restart(index, plan, self._base, self._warm)

    def _report_slow(self, now_s: float) -> None:
        """Reports slow tasks, and ends those that are chosen for it."""
        if self._slow is None or self.were_asked or self._caught.ending is not None:
            return
        running = {
            task.process.plan.name: task
            for task in self._tasks
            if task.process.plan.trains and task.status is None and task.stopped_at_s is None
        }
        for one in self._slow.find(now_s, running):
            self._screen.say([one.text])
            self._events.straggler(one)
            if one.reason:
                running[one.straggler.task].evict(f"ended by the launcher: {one.reason}")

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

    def close(self) -> None:
        """Kills all remaining processes, even after an error."""
        self._running.close()

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
            may_survive=options.may_survive,
        )
        cause = cause_of_failure(self.statuses)
        trainers = [state.status for state in states if state.trains]
        if options.may_survive and have_survivors(trainers):
            self._note_lost(now_s)
            cause = None
        others_run = any(states[index].status is None for index in to_stop)
        is_new = others_run and self._caught.ending is None and not self._has_reported
        if cause is not None and is_new:
            self._has_reported = True
            self._events.failure(cause)
            self._screen.say(stop_report(cause, self.statuses))
        for index in to_stop:
            task = self._tasks[index]
            if task.status is None and self._caught.ending in task.process.signals:
                task.stopped_at_s = now_s  # another signal would interrupt its orderly end
            else:
                task.stop()
        for index in tasks_to_kill(states, now_s, grace_s=options.grace_s):
            self._tasks[index].process.send(signal.SIGKILL)
