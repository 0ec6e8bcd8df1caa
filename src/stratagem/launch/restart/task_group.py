"""Task group: all tasks of one start, from the first process to the end of the last."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from stratagem.errors import NOT_NEEDED
from stratagem.launch.options import LaunchOptions
from stratagem.launch.plan import LOSS_FILE, TaskPlan
from stratagem.launch.prefork.warm_start import WARM_UP_AFTER_S, WarmStart
from stratagem.launch.restart.policy import (
    TaskState,
    WorkerRestarts,
    cause_of_failure,
    have_saved_and_left,
    have_survivors,
    tasks_to_kill,
    tasks_to_stop,
)
from stratagem.launch.restart.report import (
    ENDING,
    CaughtSignals,
    LaunchEvents,
    SlowTasks,
    stop_report,
)
from stratagem.launch.tasks.exit_status import ExitStatus, take_loss
from stratagem.launch.tasks.guardian import Guardian
from stratagem.launch.tasks.output import Screen, TaskLog, TaskOutput
from stratagem.launch.tasks.tied_process import tied_command
from stratagem.resources import Closing

# Process of one running task: its start, pipes, signals and end.

_CHUNK_BYTES = 2**16
# Linux pipes hold 64 KiB, and users may raise that to 1 MiB.
_PIPE_BYTES = 2**20
_PROC = Path("/proc")
# Signals that end a program go to the whole process group, as from a terminal. Others go only to
# the task: its children do not expect them and would be killed.
_TO_THE_TASK_ALONE = {signal.SIGUSR1, signal.SIGUSR2}


class TaskProcess:
    """A started task, in a separate session and process group; once it has ended, its `status`.

    `warm` forks the task if possible; None always starts a new process. Raises OSError if the
    system cannot start another process.
    """

    def __init__(
        self,
        plan: TaskPlan,
        base: Mapping[str, str],
        warm: WarmStart | None = None,
        output: TaskOutput | None = None,
    ) -> None:
        self.plan = plan
        self.output = output or TaskOutput(plan.name, None)
        self.signals: set[int] = set()
        self.is_gone = False
        self.status: ExitStatus | None = None
        self.stopped_at_s: float | None = None
        self.started_s = time.monotonic()
        forked = None if warm is None else warm.start(plan, base)
        self._process = _start_new(plan, base) if forked is None else forked
        pipes = (self._process.stdout, self._process.stderr)
        self.streams: list[IO[bytes]] = [pipe for pipe in pipes if pipe is not None]
        for pipe in self.streams:
            os.set_blocking(pipe.fileno(), False)

    @property
    def group(self) -> int:
        """Id of the process group."""
        return self._process.pid

    @property
    def state(self) -> TaskState:
        """The state on which decisions are based."""
        return TaskState(
            task_type=self.plan.task_type,
            trains=self.plan.trains,
            status=self.status,
            is_gone=self.is_gone,
            stopped_at_s=self.stopped_at_s,
        )

    def stop(self) -> None:
        """Asks the task to end."""
        self.send(signal.SIGTERM)
        self.stopped_at_s = time.monotonic()

    def returncode(self) -> int | None:
        """Returns the exit code, negative for a signal; None while the process runs."""
        return self._process.poll()

    def read(self, stream: IO[bytes]) -> bytes | None:
        """Reads from one of `streams` without waiting; b"" at its end, None if it is empty now."""
        try:
            return os.read(stream.fileno(), _CHUNK_BYTES)
        except BlockingIOError:
            return None

    def read_all(self, stream: IO[bytes]) -> bytes:
        """Reads the rest of one of `streams` after the task has ended.

        Reads at most the size of a pipe: another process may still be writing.
        """
        chunks: list[bytes] = []
        while sum(map(len, chunks)) < _PIPE_BYTES and (chunk := self.read(stream)):
            chunks.append(chunk)
        return b"".join(chunks)

    def send(self, signum: int) -> None:
        """Sends a signal to the task; signals that end a program go to its whole group."""
        self.signals.add(signum)
        # The process may have ended, or run as another user.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if signum not in _TO_THE_TASK_ALONE:
                os.killpg(self.group, signum)
            elif self._process.returncode is None:
                os.kill(self._process.pid, signum)

    def look_for_members(self) -> bool:
        """Updates and returns `is_gone`: True once no process of the group runs."""
        self.is_gone = self.is_gone or not _has_members(self.group)
        return self.is_gone

    def wait(self) -> None:
        """Waits for the end of the process."""
        self._process.wait()

    def close(self) -> None:
        """Closes the pipes, and the file of the output."""
        for stream in self.streams:
            stream.close()
        self.output.close()


def _start_new(plan: TaskPlan, base: Mapping[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(  # noqa: S603 - the command that the user gave
        tied_command(plan.command),
        env={**base, **plan.variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        start_new_session=True,
    )


def _has_members(group: int) -> bool:
    """Returns True if a process group has a process that is not a zombie.

    In a container, process 1 may never reap orphans: zombies then stay in the group forever.
    """
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    if not _PROC.joinpath("self", "stat").exists():
        return True
    for stat in _PROC.glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # State and group follow the name, which is in parentheses and may contain anything.
            state, _, member_of = stat.read_text(errors="replace").rpartition(")")[2].split()[:3]
            if int(member_of) == group and state not in ("Z", "X"):
                return True
    return False


def _why(error: OSError) -> str:
    return error.strerror or str(error)


# Tasks of one start.

# Delay until the end of a process is noticed if it prints nothing and keeps its pipes open.
_POLL_S = 0.05


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchContext:
    """Settings and services that all starts of a launch share.

    Tasks inherit `base`. `guardian` kills them if this process is killed. `kills_interrupted` kills
    tasks that still run `grace_s` after a signal to end. `slow` finds the slow tasks to report.
    """

    options: LaunchOptions
    base: Mapping[str, str]
    caught: CaughtSignals
    guardian: Guardian
    events: LaunchEvents
    kills_interrupted: bool
    slow: SlowTasks | None


class TaskGroup(Closing):
    """The tasks of one start; `warm` forks them if possible."""

    def __init__(self, context: LaunchContext, screen: Screen, warm: WarmStart | None) -> None:
        self._context, self._options = context, context.options
        self._screen, self._warm = screen, warm
        self._selector = selectors.DefaultSelector()
        self._tasks: list[TaskProcess] = []
        self._num_interrupts = 0
        self._reported: list[ExitStatus] = []
        self._restarts = WorkerRestarts(  # that others survive
            self._options.max_restarts, self._options.max_preemptions
        )
        self._has_reported = False
        self._without_start: list[ExitStatus] = []
        self.were_asked = False

    @property
    def statuses(self) -> tuple[ExitStatus, ...]:
        """The statuses of the tasks that have ended, or could not start again."""
        ended = (task.status for task in self._tasks if task.status is not None)
        return (*ended, *self._without_start)

    def run(self, plans: Sequence[TaskPlan], is_notice_due: Callable[[float], bool]) -> None:
        """Starts tasks, the leader first, and returns when none of their processes is left.

        Several tasks wait until they can be forked; for a single one that is prepared after a
        while. `is_notice_due` is called with the seconds since the start; True asks the tasks to
        save and exit. Raises OSError if a task cannot start; in a restart, that is its failure, and
        the others are killed.
        """
        warm = self._warm
        if warm is not None:
            warm.load(plans, lambda: self._context.caught.ending is not None)
        for plan in plans:
            try:
                self._start(plan, is_leader=plan is plans[0])
            except OSError as error:
                if plan.variables["STRATAGEM_RESTART_COUNT"] == "0":
                    raise
                failed = ExitStatus(
                    name=plan.name, returncode=1, at_s=time.monotonic(), no_start=_why(error)
                )
                self._without_start.append(failed)
                return
        started_s = time.monotonic()
        while not all(task.is_gone for task in self._tasks):
            self._step()
            now_s = time.monotonic()
            # Since the launch, not this start: tasks that fail early restart often.
            if warm is not None and now_s - warm.made_s >= WARM_UP_AFTER_S:
                warm.prepare(plans[0])
            if is_notice_due(now_s - started_s):
                self._ask_to_leave()

    def close(self) -> None:
        """Kills all remaining processes, even after an error."""
        for task in self._tasks:
            if not task.is_gone:
                task.send(signal.SIGKILL)
                task.wait()
                self._context.guardian.forget(task.group)
            task.close()
        self._selector.close()

    def _start(self, plan: TaskPlan, *, is_leader: bool) -> None:
        is_shown = self._options.show == "all" or is_leader
        log_dir = self._options.log_dir
        log = None if log_dir is None else TaskLog(plan, Path(log_dir), self._screen.say)
        output = TaskOutput(plan.name, self._screen if is_shown else None, log)
        with contextlib.ExitStack() as on_error:
            on_error.callback(output.close)
            task = TaskProcess(plan, self._context.base, self._warm, output)
            on_error.pop_all()
        self._tasks.append(task)
        self._context.guardian.watch(task.group)
        for index, stream in enumerate(task.streams):
            self._selector.register(stream, selectors.EVENT_READ, (task, index))

    def _restart(self, index: int, now_s: float) -> None:
        """Starts a task again that has ended, in its place among all.

        If the system refuses, that is another loss of it: the others train on.
        """
        before = self._tasks[index]
        for stream in before.streams:
            with contextlib.suppress(KeyError, ValueError):  # its end was read
                self._selector.unregister(stream)
        before.close()
        count = int(before.plan.variables["STRATAGEM_RESTART_COUNT"]) + 1
        variables = {**before.plan.variables, "STRATAGEM_RESTART_COUNT": str(count)}
        plan = dataclasses.replace(before.plan, variables=variables)
        try:
            self._start(plan, is_leader=index == 0)
        except OSError as error:
            self._screen.say([f"{plan.name} could not start again: {_why(error)}."])
            before.plan = plan
            self._plan_restart(index, ran_s=0.0, now_s=now_s)
            return
        self._tasks[index] = self._tasks.pop()

    def _step(self) -> None:
        self._read()
        now_s = time.monotonic()
        for signum in self._context.caught.take():
            self._forward(signum)
        for task in self._tasks:
            self._update(task, now_s)
            task.output.show_overdue(now_s)
        self._report_slow(now_s)
        self._stop_and_kill(now_s)

    def _read(self) -> None:
        """Shows new output; waits for it a little."""
        for key, _ in self._selector.select(_POLL_S):
            task, index = key.data
            data = task.read(key.fileobj)
            if data:
                task.output.take(data, time.monotonic(), stream=index)
            elif data is not None:
                self._selector.unregister(key.fileobj)

    def _update(self, task: TaskProcess, now_s: float) -> None:
        if task.is_gone:
            return
        returncode = task.returncode()
        if returncode is None:
            return
        if task.status is None:
            self._show_rest(task, now_s)
            task.status = ExitStatus(
                name=task.plan.name,
                returncode=returncode,
                at_s=now_s,
                was_stopped=task.stopped_at_s is not None or self._is_idle_server(task.plan),
                signals=frozenset(task.signals),
                lines=task.output.last_lines(),
                was_shown=task.output.is_shown,
                loss=take_loss(task.plan.variables.get(LOSS_FILE)),
            )
        if task.look_for_members():
            self._show_rest(task, now_s)
            self._context.guardian.forget(task.group)

    def _show_rest(self, task: TaskProcess, now_s: float) -> None:
        for index, stream in enumerate(task.streams):
            task.output.take(task.read_all(stream), now_s, stream=index)
        task.output.show_rest(now_s)

    def _is_idle_server(self, plan: TaskPlan) -> bool:
        """Returns True for a server whose workers are done: it may fail before it is stopped."""
        trainers = [task.status for task in self._tasks if task.plan.trains]
        is_done = all(status is not None and not status.failed for status in trainers)
        return plan.serves and is_done

    def _note_lost(self, now_s: float) -> None:
        """Reports workers that others have survived, and starts them again."""
        trainers = [task for task in self._tasks if task.plan.trains]
        statuses = [task.status for task in trainers]
        num_left = statuses.count(None)
        is_ending = (
            self.were_asked
            or self._context.caught.ending is not None
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
                    index = next(n for n, one in enumerate(self._tasks) if one is task)
                    ran_s, left = now_s - task.started_s, have_saved_and_left([status])
                    self._plan_restart(index, ran_s=ran_s, now_s=now_s, saved_and_left=left)
        if num_left:
            due = self._restarts.take_due(now_s, lambda index: self._tasks[index].is_gone)
            for index in [] if is_ending else due:
                self._restart(index, now_s)

    def _plan_restart(
        self, index: int, *, ran_s: float, now_s: float, saved_and_left: bool = False
    ) -> None:
        name = self._tasks[index].plan.name
        if text := self._restarts.note_loss(
            index, name, ran_s=ran_s, now_s=now_s, saved_and_left=saved_and_left
        ):
            self._screen.say([text])

    def _report_slow(self, now_s: float) -> None:
        if self._context.slow is None or self.were_asked or self._context.caught.ending is not None:
            return
        running = {
            task.plan.name
            for task in self._tasks
            if task.plan.trains and task.status is None and task.stopped_at_s is None
        }
        for one in self._context.slow.find(now_s, running):
            self._screen.say([f"{one.text}."])

    def _ask_to_leave(self) -> None:
        """Asks the tasks once to save and exit, unless they are about to end anyway."""
        trainers = [task for task in self._tasks if task.plan.trains]
        is_ending = any(task.status is not None or task.stopped_at_s for task in trainers)
        if self.were_asked or is_ending or self._context.caught.ending is not None:
            return
        self.were_asked = True
        self._screen.say(["Asking the tasks to save and leave, so that all workers can start."])
        self._context.events.notice("all workers are to start again")
        for task in self._tasks:
            task.stop()

    def _forward(self, signum: signal.Signals) -> None:
        self._num_interrupts += signum == signal.SIGINT
        is_impatient = signum == signal.SIGINT and self._num_interrupts > 1
        if signum in ENDING:
            self._context.events.notice(f"{signum.name} to the launcher")
        for task in self._tasks:
            if not task.is_gone:
                task.send(signal.SIGKILL if is_impatient else signum)
                if (
                    signum in ENDING
                    and self._context.kills_interrupted
                    and task.stopped_at_s is None
                ):
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
        cause = cause_of_failure(self.statuses)
        trainers = [state.status for state in states if state.trains]
        if options.survivors and have_survivors(trainers):
            self._note_lost(now_s)
            cause = None
        others_run = any(states[index].status is None for index in to_stop)
        is_new = others_run and self._context.caught.ending is None and not self._has_reported
        if cause is not None and is_new:
            self._has_reported = True
            self._context.events.failure(cause)
            self._screen.say(stop_report(cause, self.statuses))
        for index in to_stop:
            task = self._tasks[index]
            if task.status is None and self._context.caught.ending in task.signals:
                task.stopped_at_s = now_s  # another signal would interrupt its orderly end
            else:
                task.stop()
        for index in tasks_to_kill(states, now_s, grace_s=options.grace_s):
            self._tasks[index].send(signal.SIGKILL)
