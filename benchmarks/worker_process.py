"""A worker as a process: started once, asked many times, never waited for without a limit."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.workers.protocol import ANSWER_PREFIX

__all__ = ["WorkerError", "WorkerProcess"]

_REPOSITORY = Path(__file__).parents[1]
_STDERR_TAIL_BYTES = 3000
_EXIT_LIMIT_S = 10.0


class WorkerError(RuntimeError):
    """A worker ended, or did not answer in time."""


class WorkerProcess:
    """Runs a worker's program. Use as a context manager: leaving it ends the process.

    Args:
        name: of the worker, for messages.
        command: program and arguments.
        environment: all of its variables.
        folder: its working directory, from which `-m` imports its program.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        folder: Path = _REPOSITORY,
    ) -> None:
        self.name = name
        self._command = list(command)
        self._buffer = b""
        # A file and not a pipe: nobody has to empty it.
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            bufsize=0,
            cwd=folder,
            env=dict(environment),
            start_new_session=True,  # so that its own children can be ended with it
        )

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def read_answer(self, limit_s: float) -> dict[str, Any]:
        """Waits for the next answer.

        Raises:
            WorkerError: none within the limit, or the process has ended.
        """
        deadline_s = time.monotonic() + limit_s
        while True:
            line, newline, rest = self._buffer.partition(b"\n")
            if newline:
                self._buffer = rest
                text = line.decode(errors="replace")
                if text.startswith(ANSWER_PREFIX):
                    return json.loads(text.removeprefix(ANSWER_PREFIX))
                continue
            self._read_more(deadline_s, limit_s)

    def ask(self, question: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        """Sends a question and waits for its answer.

        Raises:
            WorkerError: no answer within the limit, or the process has ended.
        """
        self.tell(question)
        return self.read_answer(limit_s)

    def tell(self, question: Mapping[str, Any]) -> None:
        """Sends a question, whose answer `read_answer` waits for."""
        assert self._process.stdin is not None
        # A process that has ended tells why when its answer is read.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(question).encode() + b"\n")

    def close(self) -> None:
        """Ends the process and its children, asking first."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_LIMIT_S if self._process.poll() is None else 0)
        self._kill()
        self._process.stdout.close()
        self._stderr.close()

    def _read_more(self, deadline_s: float, limit_s: float) -> None:
        assert self._process.stdout is not None
        remaining_s = max(0.0, deadline_s - time.monotonic())
        ready, _, _ = select.select([self._process.stdout], [], [], remaining_s)
        if not ready:
            self._kill()
            raise self._error(f"did not answer within {limit_s:g} s")
        more = os.read(self._process.stdout.fileno(), 1 << 16)
        if not more:
            self._kill()
            raise self._error(f"ended with exit code {self._process.returncode}")
        self._buffer += more

    def _kill(self) -> None:
        """Ends what is left of the process's group, after a moment to end by itself."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0.2)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _error(self, what: str) -> WorkerError:
        size = self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, size - _STDERR_TAIL_BYTES))
        tail = self._stderr.read().decode(errors="replace").strip() or "(nothing)"
        return WorkerError(
            f"Worker {self.name!r} {what}.\nIts command: {shlex.join(self._command)}\n"
            f"The end of its stderr:\n{tail}"
        )
