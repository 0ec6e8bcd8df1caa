"""Forking tasks from a process that has already loaded JAX and Keras."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from stratagem.errors import UnavailableError
from stratagem.launch.plan import INPUT, TaskPlan
from stratagem.launch.prefork.fork_server import ForkedProcess, ForkServer
from stratagem.launch.prefork.server_program import script_job
from stratagem.resources import Closing

# Check of scripts for changes of the environment, by their text.

_READS = re.compile(
    r"\bin os\.environ\b|\bos\.getenv\b|\bos\.environ\.(?:copy|get|items|keys|values)\b"
    # os.environ["A"], unless it is deleted or something is assigned to it.
    r"|(?<!del )\bos\.environ\[[^][]*\](?!\s*(?:,|in\b|[+|]?=(?!=)))"
)
_NAMES = re.compile(r"environ\b|putenv|unsetenv")


def writes_environment(text: str) -> bool:
    """Returns True if a script names the environment in any other way than to read it."""
    return bool(_NAMES.search(_READS.sub("", text)))


# Forking tasks from a process that has already loaded JAX and Keras.

# By then the tasks have loaded their own modules, so the server takes no core from them.
WARM_UP_AFTER_S = 20.0
_PRELOADED = ("jax", "keras", "stratagem.keras", "stratagem.strategies.mirrored")
# Read by a backend when it starts, or by the script, so tasks may differ in them. Any other
# variable may have been read while JAX or Keras was loaded.
_READ_LATE = re.compile(r"STRATAGEM_\w+|TF_CONFIG|CUDA_VISIBLE_DEVICES|XLA_FLAGS|NPROC")
_USES_JAX = re.compile(r"\b(?:stratagem|keras|jax)\b")
# Loading takes seconds. With a slower disk, tasks might as well load everything themselves.
_LOAD_S = 60.0
# Delay until a signal that ends the launcher is noticed while loading.
_POLL_S = 0.05
# Far more than a fork takes; a server that does not reply is no longer used. It is not ended before
# the launch: earlier forks, which may train, would end with it.
_REPLY_S = 10.0


def can_fork(command: Sequence[str], base: Mapping[str, str]) -> bool:
    """Returns True if a process that has loaded JAX can become a task with this command.

    That takes Linux, and a Python script for this interpreter that mentions JAX, Keras or this
    package and sets no environment variables.
    """
    if sys.platform != "linux" or base.get("KERAS_BACKEND", "jax") not in ("", "jax"):
        return False
    if len(command) < 2 or command[0] != sys.executable or not command[1].endswith(".py"):
        return False
    try:
        text = Path(command[1]).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    # The script might set variables that JAX reads while loading, which has already happened.
    return bool(_USES_JAX.search(text)) and not writes_environment(text)


class WarmStart(Closing):
    """Fork server of a launch, started when the first task could use it."""

    def __init__(self, base: Mapping[str, str]) -> None:
        self.made_s = time.monotonic()
        self.num_started = 0
        self._base = dict(base)
        self._server: ForkServer | None = None
        self._has_failed = False
        self._variables: dict[str, str] = {}

    def prepare(self, plan: TaskPlan) -> None:
        """Begins loading JAX and Keras for tasks like this one, unless that has begun."""
        if self._server is None:
            self._variables = self._read_early(plan)
            self._server = ForkServer(
                _PRELOADED, self._variables, inherits_path=False, is_silent=True
            )

    def load(self, plans: Sequence[TaskPlan], is_given_up: Callable[[], bool]) -> None:
        """Loads JAX and Keras once for tasks that start together, and waits for it.

        Does nothing for a single task, or for tasks that would load with different variables. Input
        workers, which do not run the user's program, are left out.
        """
        own = [plan for plan in plans if plan.task_type != INPUT]
        first, *others = map(self._read_early, own)
        if not others or any(variables != first for variables in others):
            return
        self.prepare(own[0])
        deadline_s = time.monotonic() + _LOAD_S
        while self._server is not None and not self._server.wait_until_loaded(_POLL_S):
            if is_given_up() or time.monotonic() > deadline_s:
                return

    def is_ready_for(self, plan: TaskPlan) -> bool:
        """Returns True if everything is loaded, with the variables that the task would have."""
        is_ready = self._server is not None and self._server.is_ready and not self._has_failed
        is_script = plan.task_type != INPUT
        return is_ready and is_script and self._read_early(plan) == self._variables

    def start(self, plan: TaskPlan, base: Mapping[str, str]) -> ForkedProcess | None:
        """Forks a task; returns None if it must be started as a new process."""
        if self._server is None or not self.is_ready_for(plan):
            return None
        job = script_job(plan.command[1:], {**base, **plan.variables})
        with contextlib.ExitStack() as on_error, contextlib.ExitStack() as always:
            readers: list[IO[bytes]] = []
            writers: list[int] = []
            for _ in range(2):
                reader, writer = os.pipe()
                always.callback(os.close, writer)
                readers.append(on_error.enter_context(os.fdopen(reader, "rb", buffering=0)))
                writers.append(writer)
            try:
                process = self._server.fork("script", job, writers, timeout_s=_REPLY_S)
            except UnavailableError:
                self._has_failed = True
                return None
            on_error.pop_all()
        self.num_started += 1
        process.stdout, process.stderr = readers
        return process

    def close(self) -> None:
        """Ends the server and the tasks that are left."""
        if self._server is not None:
            self._server.close()

    def _read_early(self, plan: TaskPlan) -> dict[str, str]:
        early = {
            name: text for name, text in plan.variables.items() if not _READ_LATE.fullmatch(name)
        }
        return {**self._base, **early}
