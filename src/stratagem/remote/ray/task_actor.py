"""A task of a job on the machine that is meant for it: one process, started by Ray."""

from __future__ import annotations

import queue
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from stratagem import environment
from stratagem.launch.plan.ports import free_ports
from stratagem.remote.ray.streamed_process import StreamedProcess

__all__ = ["Said", "TaskActor"]

# What a task says: "out", "err" or "end", and a text.
Said = tuple[str, str]
_MAX_SAID = 1000


class TaskActor:
    """The inside of an actor, which runs one process.

    Args:
        host: of its machine, by which the other tasks reach it.
    """

    def __init__(self, host: str) -> None:
        self._host = host
        self._said: queue.Queue[Said] = queue.Queue(_MAX_SAID)
        self._folder = tempfile.TemporaryDirectory(prefix="stratagem-")
        self._process: StreamedProcess | None = None

    def place(self) -> tuple[str, int]:
        """Returns the host, and a port that is free there."""
        return self._host, free_ports(1)[0]

    def start(self, command: Sequence[str], variables: Mapping[str, str]) -> None:
        """Starts the process.

        Args:
            command: the arguments of this Python; "{answer}" stands for a file.
            variables: of the environment, beside those of this process.
        """
        words = [word.replace("{answer}", str(self._answer)) for word in command]
        own = {
            name: text
            for name, text in environment.snapshot().items()
            if not name.startswith(("RAY_", "TF_CONFIG"))
        }
        self._process = StreamedProcess(
            (sys.executable, *words), {**own, **variables}, lambda *said: self._said.put(said)
        )

    def next(self, timeout_s: float) -> list[Said]:
        """Returns what the task has said since the last call, or nothing within the time.

        Args:
            timeout_s: how long to wait for the first of it.
        """
        assert self._process is not None
        said: list[Said] = []
        try:
            said.append(self._said.get(timeout=timeout_s))
            while len(said) < _MAX_SAID:
                said.append(self._said.get_nowait())
        except queue.Empty:
            pass
        if not said and (code := self._process.wait(0.0)) is not None and self._said.empty():
            said.append(("end", str(code)))
        return said

    def answer(self) -> bytes:
        """Returns what the process has written as its answer; nothing if it has not."""
        return self._answer.read_bytes() if self._answer.exists() else b""

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.end()
        self._folder.cleanup()

    @property
    def _answer(self) -> Path:
        return Path(self._folder.name) / "answer"
