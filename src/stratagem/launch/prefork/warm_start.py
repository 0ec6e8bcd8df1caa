"""Forks tasks from a process that has loaded JAX and Keras already; see `warm_server.py`."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from stratagem.launch.plan.environment_writes import sets_variables
from stratagem.launch.plan.task_plan import TaskPlan
from stratagem.launch.prefork.warm_server import MAX_REQUEST_BYTES, PROGRAM
from stratagem.launch.tasks.guardian import Guardian
from stratagem.launch.tasks.tied_process import tied_command

__all__ = ["WARM_UP_AFTER_S", "WarmProcess", "WarmStart", "can_be_warm"]

# By then the tasks have loaded what they need themselves: the server takes no core from them.
WARM_UP_AFTER_S = 20.0
# These are read when a backend starts, or by the script: tasks may differ in them. All others may
# have been read when JAX or Keras was loaded.
_READ_LATE = re.compile(r"STRATAGEM_\w+|TF_CONFIG|CUDA_VISIBLE_DEVICES|XLA_FLAGS|NPROC")
_USES_JAX = re.compile(r"\b(?:stratagem|keras|jax)\b")
# Loading takes seconds; a disk that takes this long is no quicker for tasks that load all anew.
_LOAD_S = 60.0
# How long a signal that ends the launcher goes unseen meanwhile.
_POLL_S = 0.05
# Far more than a fork takes; a server that does not answer is not used any more.
_ANSWER_S = 10.0
_KILLED = -9


def can_be_warm(command: Sequence[str], base: Mapping[str, str]) -> bool:
    """Returns whether tasks of a command may be forked from a process that has loaded JAX.

    Args:
        command: the program and its arguments.
        base: the variables that they inherit.

    Returns:
        True on Linux for a Python script that runs on this interpreter, names JAX, Keras or this
        library, and sets no variables.
    """
    if sys.platform != "linux" or base.get("KERAS_BACKEND", "jax") not in ("", "jax"):
        return False
    if len(command) < 2 or command[0] != sys.executable or not command[1].endswith(".py"):
        return False
    try:
        text = Path(command[1]).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    # A script may set those that are read when JAX is loaded, which it has been.
    return bool(_USES_JAX.search(text)) and not sets_variables(text)


class WarmProcess:
    """A task that was forked, with what the launcher uses of `subprocess.Popen`.

    Args:
        process_id: its id.
        server: which hears of its end.
        stdout: the end of a pipe.
        stderr: the end of another one.
    """

    def __init__(
        self, process_id: int, server: WarmStart, stdout: IO[bytes], stderr: IO[bytes]
    ) -> None:
        self.pid = process_id
        self.returncode: int | None = None
        self.stdout = stdout
        self.stderr = stderr
        self._server = server

    def poll(self) -> int | None:
        """Returns how it ended, as `subprocess` tells it; None while it runs."""
        if self.returncode is None:
            self.returncode = self._server.end_of(self.pid)
        return self.returncode

    def wait(self) -> int:
        """Waits for its end, and returns how it ended."""
        while (returncode := self.poll()) is None:
            self._server.hear(_ANSWER_S)
        return returncode


class WarmStart:
    """The process that tasks are forked from, as the launcher sees it.

    `num_started` tasks were.

    Args:
        base: the variables that tasks inherit.
        guardian: who ends it if this process is killed.

    Raises:
        OSError: the system starts no more processes.
    """

    def __init__(self, base: Mapping[str, str], guardian: Guardian) -> None:
        self.made_s = time.monotonic()
        self.num_started = 0
        self._base = dict(base)
        self._guardian = guardian
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._variables: dict[str, str] = {}
        self._is_ready = False
        self._started: list[int] = []
        self._running: set[int] = set()
        self._ended: dict[int, int] = {}

    def __enter__(self) -> WarmStart:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def prepare(self, plan: TaskPlan) -> None:
        """Begins to load JAX and Keras, if that was not begun before.

        Args:
            plan: a task such as those that it is to start.
        """
        if self._process is not None:
            return
        self._variables = self._read_early(plan)
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                tied_command((sys.executable, "-c", PROGRAM, str(theirs.fileno()))),
                env=self._variables,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=(theirs.fileno(),),
            )
        self._guardian.watch(self._process.pid)

    def load(self, plans: Sequence[TaskPlan], is_given_up: Callable[[], bool]) -> None:
        """Loads JAX and Keras once for several tasks that start now, instead of once in each.

        Args:
            plans: the tasks; where they are to load with different variables, or one is alone,
                nothing is done.
            is_given_up: whether they are not to start any more.
        """
        first, *others = map(self._read_early, plans)
        if not others or any(variables != first for variables in others):
            return
        self.prepare(plans[0])
        deadline_s = time.monotonic() + _LOAD_S
        while self._is_open and not self._is_ready:
            if is_given_up() or time.monotonic() > deadline_s:
                return
            self.hear(_POLL_S)

    def is_ready_for(self, plan: TaskPlan) -> bool:
        """Returns whether a task can be forked now.

        Args:
            plan: the task.

        Returns:
            True if all is loaded, with the variables that the task would have.
        """
        self.hear(0.0)
        return self._is_ready and self._read_early(plan) == self._variables

    def start(self, plan: TaskPlan, base: Mapping[str, str]) -> WarmProcess | None:
        """Forks a task.

        Args:
            plan: the task.
            base: the variables that it inherits.

        Returns:
            The task; None if it has to be started anew.
        """
        if not self.is_ready_for(plan):
            return None
        request = {
            "argv": plan.command[1:],
            "variables": {**base, **plan.variables},
            "folder": os.getcwd(),
        }
        pipes = [os.pipe() for _ in range(2)]
        process_id = self._ask(json.dumps(request).encode(), [theirs for _, theirs in pipes])
        for _, theirs in pipes:
            os.close(theirs)
        if process_id is None:
            for ours, _ in pipes:
                os.close(ours)
            return None
        self._running.add(process_id)
        self.num_started += 1
        stdout, stderr = (os.fdopen(ours, "rb", buffering=0) for ours, _ in pipes)
        return WarmProcess(process_id, self, stdout, stderr)

    def end_of(self, process_id: int) -> int | None:
        """Returns how a task ended; None while it runs.

        Args:
            process_id: of the task.
        """
        self.hear(0.0)
        return self._ended.get(process_id)

    def hear(self, timeout_s: float) -> None:
        """Takes what the server says.

        Args:
            timeout_s: how long to wait for its next word.
        """
        while self._connection is not None:
            self._connection.settimeout(timeout_s)
            try:
                data = self._connection.recv(MAX_REQUEST_BYTES)
            except (BlockingIOError, TimeoutError):
                return
            except OSError:
                data = b""
            if not data:
                self._lose()
                return
            self._take(json.loads(data))
            timeout_s = 0.0

    def close(self) -> None:
        """Ends the server, and with it what is left of its tasks."""
        self._lose()

    @property
    def _is_open(self) -> bool:
        return self._connection is not None

    def _ask(self, request: bytes, outputs: Sequence[int]) -> int | None:
        if len(request) > MAX_REQUEST_BYTES or self._connection is None:
            return None
        self._connection.settimeout(_ANSWER_S)
        try:
            socket.send_fds(self._connection, [request], outputs)
        except OSError:
            self._lose()
            return None
        deadline_s = time.monotonic() + _ANSWER_S
        while not self._started and self._is_open:
            if time.monotonic() > deadline_s:
                self._lose()
            self.hear(_ANSWER_S)
        return self._started.pop() if self._started else None

    def _lose(self) -> None:
        """Ends a server that does not answer, or is not needed any more; its tasks die with it."""
        self._is_ready = False
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            self._process.wait()
            self._guardian.forget(self._process.pid)
        self._ended.update(dict.fromkeys(self._running, _KILLED))
        self._running.clear()

    def _take(self, message: dict[str, Any]) -> None:
        if message["kind"] == "ready":
            self._is_ready = True
        elif message["kind"] == "started":
            self._started.append(message["process_id"])
        elif message["kind"] == "ended":
            self._running.discard(message["process_id"])
            self._ended[message["process_id"]] = message["code"]

    def _read_early(self, plan: TaskPlan) -> dict[str, str]:
        early = {
            name: text for name, text in plan.variables.items() if not _READ_LATE.fullmatch(name)
        }
        return {**self._base, **early}
