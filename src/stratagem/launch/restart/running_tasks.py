"""Running tasks of one start: their processes, output and exit statuses, without decisions."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from stratagem.launch.options import LaunchOptions
from stratagem.launch.plan import LOSS_FILE, TaskPlan
from stratagem.launch.prefork.warm_start import WarmStart
from stratagem.launch.restart.policy import TaskState
from stratagem.launch.tasks.exit_status import ExitStatus, take_loss
from stratagem.launch.tasks.guardian import Guardian
from stratagem.launch.tasks.output import Screen, TaskOutput, open_log
from stratagem.launch.tasks.tied_process import tied_command

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
    """Tasks of one start, which inherit `base`.

    `warm` forks tasks if possible. `guardian` kills them if this process is killed.
    """

    def __init__(
        self,
        options: LaunchOptions,
        base: Mapping[str, str],
        warm: WarmStart | None,
        screen: Screen,
        guardian: Guardian,
    ) -> None:
        self._options = options
        self._base, self._warm = base, warm
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

    def start(self, plan: TaskPlan, *, is_leader: bool) -> None:
        """Starts a task on this machine."""
        is_shown = self._options.show == "all" or is_leader
        log_dir = self._options.log_dir
        file = None if log_dir is None else open_log(plan, Path(log_dir))
        output = TaskOutput(plan.name, self._screen if is_shown else None, file)
        with contextlib.ExitStack() as on_error:
            on_error.callback(output.close)
            process = TaskProcess(plan, self._base, self._warm)
            on_error.pop_all()
        task = RunningTask(process=process, output=output)
        self.tasks.append(task)
        self._guardian.watch(process.group)
        for index, stream in enumerate(process.streams):
            self._selector.register(stream, selectors.EVENT_READ, (task, index))

    def restart(self, index: int, plan: TaskPlan) -> None:
        """Starts a task again that has ended, in its place among all."""
        before = self.tasks[index]
        for stream in before.process.streams:
            with contextlib.suppress(KeyError, ValueError):  # its end was read
                self._selector.unregister(stream)
        before.process.close()
        before.output.close()
        self.start(plan, is_leader=index == 0)
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
                loss=take_loss(process.plan.variables.get(LOSS_FILE)),
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


# Process of one running task: its start, pipes, signals and end.

_CHUNK_BYTES = 2**16
# Linux pipes hold 64 KiB, and users may raise that to 1 MiB.
_PIPE_BYTES = 2**20
_PROC = Path("/proc")
# Signals that end a program go to the whole process group, as from a terminal. Others go only to
# the task: its children do not expect them and would be killed.
_TO_THE_TASK_ALONE = {signal.SIGUSR1, signal.SIGUSR2}


class TaskProcess:
    """A started task, in a separate session and process group.

    `warm` forks the task if possible; None always starts a new process. Raises OSError if the
    system cannot start another process.
    """

    def __init__(
        self, plan: TaskPlan, base: Mapping[str, str], warm: WarmStart | None = None
    ) -> None:
        self.plan = plan
        self.signals: set[int] = set()
        self.is_gone = False
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
        """Closes the pipes."""
        for stream in self.streams:
            stream.close()


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
