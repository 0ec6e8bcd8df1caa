"""Process of one running task: its start, pipes, signals and end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Protocol

from stratagem.launch.plan.task_plan import TaskPlan
from stratagem.launch.tasks.tied_process import tied_command

_CHUNK_BYTES = 2**16
# Linux pipes hold 64 KiB, and users may raise that to 1 MiB.
_PIPE_BYTES = 2**20
_PROC = Path("/proc")
# Signals that end a program go to the whole process group, as from a terminal. Others go only to
# the task: its children do not expect them and would be killed.
_TO_THE_TASK_ALONE = {signal.SIGUSR1, signal.SIGUSR2}


class PipedProcess(Protocol):
    """The part of `subprocess.Popen` that a task needs."""

    @property
    def pid(self) -> int:
        """Process id."""
        ...

    @property
    def returncode(self) -> int | None:
        """Exit code, negative for a signal; None until `poll` or `wait` have seen the end."""
        ...

    @property
    def stdout(self) -> IO[bytes] | None:
        """Read end of a pipe."""
        ...

    @property
    def stderr(self) -> IO[bytes] | None:
        """Read end of a pipe."""
        ...

    def poll(self) -> int | None:
        """Returns the exit code, or None while it runs."""
        ...

    def wait(self) -> int:
        """Waits for the end and returns the exit code."""
        ...


class TaskForker(Protocol):
    """Starts tasks from a process that has already loaded their modules."""

    def start(self, plan: TaskPlan, base: Mapping[str, str]) -> PipedProcess | None:
        """Forks a task; returns None if it must be started as a new process."""
        ...


class TaskProcess:
    """A started task, in a separate session and process group.

    `forker` forks the task if possible; None always starts a new process. Raises OSError if the
    system cannot start another process.
    """

    def __init__(
        self, plan: TaskPlan, base: Mapping[str, str], forker: TaskForker | None = None
    ) -> None:
        self.plan = plan
        self.signals: set[int] = set()
        self.is_gone = False
        forked = None if forker is None else forker.start(plan, base)
        self._process: PipedProcess = _start_new(plan, base) if forked is None else forked
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
