"""One task while it runs: its process, what it prints, and how it is ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from stratagem.launch.plan.task_plan import TaskPlan
from stratagem.launch.prefork.warm_start import WarmStart
from stratagem.launch.tasks.tied_process import tied_command

__all__ = ["TaskProcess"]

_CHUNK_BYTES = 2**16
# A pipe holds 64 KiB unless somebody has changed that; 1 MiB is what everybody may change it to.
_PIPE_BYTES = 2**20
_PROC = Path("/proc")
# Signals that end a program go to all that a task has started, as a terminal's do; others only to
# the task itself, because its children hardly expect them and would be killed.
_TO_THE_TASK_ALONE = {signal.SIGUSR1, signal.SIGUSR2}


class TaskProcess:
    """A started task, in a session and a process group of its own.

    Args:
        plan: what to run.
        base: the variables that it inherits.
        warm: forks it, where it can; None starts it anew.

    Raises:
        OSError: the system starts no more processes.
    """

    def __init__(
        self, plan: TaskPlan, base: Mapping[str, str], warm: WarmStart | None = None
    ) -> None:
        self.plan = plan
        self.signals: set[int] = set()
        self.is_gone = False
        forked = None if warm is None else warm.start(plan, base)
        self._process = _started_anew(plan, base) if forked is None else forked
        pipes = (self._process.stdout, self._process.stderr)
        self.streams: list[IO[bytes]] = [pipe for pipe in pipes if pipe is not None]
        for pipe in self.streams:
            os.set_blocking(pipe.fileno(), False)

    @property
    def group(self) -> int:
        """The id of its process group."""
        return self._process.pid

    def returncode(self) -> int | None:
        """Returns how the process itself ended.

        Returns:
            Its exit code, or minus a signal's number; None while it runs.
        """
        return self._process.poll()

    def read(self, stream: IO[bytes]) -> bytes | None:
        """Returns what can be read at once.

        Args:
            stream: one of `streams`.

        Returns:
            Bytes; none at the end of the stream; None where there is nothing now.
        """
        try:
            return os.read(stream.fileno(), _CHUNK_BYTES)
        except BlockingIOError:
            return None

    def read_all(self, stream: IO[bytes]) -> bytes:
        """Returns what a pipe holds when its writer has ended.

        Args:
            stream: one of `streams`.

        Returns:
            Bytes. No more than fit into a pipe: another process may still be writing.
        """
        chunks: list[bytes] = []
        while sum(map(len, chunks)) < _PIPE_BYTES and (chunk := self.read(stream)):
            chunks.append(chunk)
        return b"".join(chunks)

    def send(self, signum: int) -> None:
        """Sends a signal to the task, and to what it has started if the signal is to end it.

        Args:
            signum: the signal.
        """
        self.signals.add(signum)
        # A process that has ended, or has become another user's, gets none.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if signum not in _TO_THE_TASK_ALONE:
                os.killpg(self.group, signum)
            elif self._process.returncode is None:
                os.kill(self._process.pid, signum)

    def look_for_members(self) -> bool:
        """Notes in `is_gone` whether anything of an ended task still runs.

        Returns:
            The same.
        """
        self.is_gone = self.is_gone or not _has_members(self.group)
        return self.is_gone

    def wait(self) -> None:
        """Waits for the process itself, which was killed."""
        self._process.wait()

    def close(self) -> None:
        """Lets go of its pipes."""
        for stream in self.streams:
            stream.close()


def _started_anew(plan: TaskPlan, base: Mapping[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        tied_command(plan.command),
        env={**base, **plan.variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        start_new_session=True,
    )


def _has_members(group: int) -> bool:
    """Whether a process group has a process that is more than an entry in the table.

    What a task leaves behind is waited for by process 1, and in a container that may do nothing:
    its dead then stay members for ever.
    """
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    if not _PROC.joinpath("self", "stat").exists():
        return True
    for stat in _PROC.glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The name stands in parentheses and may hold anything: state and group follow it.
            state, _, member_of = stat.read_text(errors="replace").rpartition(")")[2].split()[:3]
            if int(member_of) == group and state not in ("Z", "X"):
                return True
    return False
