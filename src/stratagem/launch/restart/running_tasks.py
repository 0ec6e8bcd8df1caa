"""Running tasks of one start: their processes, output and exit statuses, without decisions."""

from __future__ import annotations

import contextlib
import dataclasses
import selectors
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from stratagem.launch.plan.options import LaunchOptions
from stratagem.launch.plan.task_plan import TaskPlan
from stratagem.launch.restart.policy import TaskState
from stratagem.launch.tasks.exit_status import ExitStatus
from stratagem.launch.tasks.guardian import Guardian
from stratagem.launch.tasks.output.screen import Screen
from stratagem.launch.tasks.output.task_output import TaskOutput, open_log
from stratagem.launch.tasks.task_process import TaskForker, TaskProcess

# Delay until the end of a process is noticed if it prints nothing and keeps its pipes open.
_POLL_S = 0.05


@dataclasses.dataclass(kw_only=True)
class RunningTask:
    """One task: its process, its output and, once it has ended, its exit status."""

    process: TaskProcess
    output: TaskOutput
    status: ExitStatus | None = None
    stopped_at_s: float | None = None
    started_s: float = dataclasses.field(default_factory=time.monotonic)

    @property
    def state(self) -> TaskState:
        """The state on which decisions are based."""
        plan = self.process.plan
        return TaskState(
            task_type=plan.task_type,
            trains=plan.trains,
            status=self.status,
            is_gone=self.process.is_gone,
            stopped_at_s=self.stopped_at_s,
        )

    def stop(self, signum: int = signal.SIGTERM) -> None:
        """Sends a signal that asks the task to end."""
        self.process.send(signum)
        self.stopped_at_s = time.monotonic()


class RunningTasks:
    """Tasks of one start. `guardian` kills those of this machine if this process is killed."""

    def __init__(self, options: LaunchOptions, screen: Screen, guardian: Guardian) -> None:
        self._options = options
        self._screen = screen
        self._guardian = guardian
        self._selector = selectors.DefaultSelector()
        self.tasks: list[RunningTask] = []

    @property
    def is_gone(self) -> bool:
        """True when no process of any task is left."""
        return all(task.process.is_gone for task in self.tasks)

    @property
    def statuses(self) -> tuple[ExitStatus, ...]:
        """The statuses of the tasks that have ended."""
        return tuple(task.status for task in self.tasks if task.status is not None)

    def start(
        self, plan: TaskPlan, base: Mapping[str, str], warm: TaskForker | None, *, is_leader: bool
    ) -> None:
        """Starts a task on this machine."""
        is_shown = self._options.show == "all" or is_leader
        log_dir = self._options.log_dir
        file = None if log_dir is None else open_log(plan, Path(log_dir))
        output = TaskOutput(plan.name, self._screen if is_shown else None, file)
        with contextlib.ExitStack() as on_error:
            on_error.callback(output.close)
            process = TaskProcess(plan, base, warm)
            on_error.pop_all()
        task = RunningTask(process=process, output=output)
        self.tasks.append(task)
        self._guardian.watch(process.group)
        for index, stream in enumerate(process.streams):
            self._selector.register(stream, selectors.EVENT_READ, (task, index))

    def restart(
        self, index: int, plan: TaskPlan, base: Mapping[str, str], warm: TaskForker | None
    ) -> None:
        """Starts a task again that has ended, in its place among all."""
        before = self.tasks[index]
        for stream in before.process.streams:
            with contextlib.suppress(KeyError, ValueError):  # its end was read
                self._selector.unregister(stream)
        before.process.close()
        before.output.close()
        self.start(plan, base, warm, is_leader=index == 0)
        self.tasks[index] = self.tasks.pop()

    def read(self) -> None:
        """Shows new output; waits for it a little."""
        for key, _ in self._selector.select(_POLL_S):
            task, index = key.data
            data = task.process.read(key.fileobj)
            if data:
                task.output.take(data, time.monotonic(), stream=index)
            elif data is not None:
                self._selector.unregister(key.fileobj)

    def update(self, now_s: float) -> None:
        """Records the tasks that have ended."""
        for task in self.tasks:
            self._update(task, now_s)
            task.output.show_overdue(now_s)

    def close(self) -> None:
        """Kills all remaining processes, even after an error."""
        for task in self.tasks:
            if not task.process.is_gone:
                task.process.send(signal.SIGKILL)
                task.process.wait()
                self._guardian.forget(task.process.group)
            task.process.close()
            task.output.close()
        self._selector.close()

    def _update(self, task: RunningTask, now_s: float) -> None:
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

    def _show_rest(self, task: RunningTask, now_s: float) -> None:
        for index, stream in enumerate(task.process.streams):
            task.output.take(task.process.read_all(stream), now_s, stream=index)
        task.output.show_rest(now_s)

    def _is_idle_server(self, plan: TaskPlan) -> bool:
        """Returns True for a server whose workers are done: it may fail before it is stopped."""
        trainers = [task.status for task in self.tasks if task.process.plan.trains]
        is_done = all(status is not None and not status.failed for status in trainers)
        return plan.serves and is_done
