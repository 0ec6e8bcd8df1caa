"""Ray actor that runs one task of a job on the task's machine."""

from __future__ import annotations

import queue
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from stratagem import environment
from stratagem.launch.plan.ports import free_ports
from stratagem.launch.remote.ray.streamed_process import StreamedProcess
from stratagem.temporary_folders import TemporaryFolder

# "out", "err" or "end", and a text: output or exit code.
TaskMessage = tuple[str, str]
_MAX_MESSAGES = 1000


class TaskActor:
    """Runs one process. Other tasks reach its machine at `host`."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._messages: queue.Queue[TaskMessage] = queue.Queue(_MAX_MESSAGES)
        self._folder = TemporaryFolder("stratagem-task-")
        self._process: StreamedProcess | None = None

    def free_address(self) -> tuple[str, int]:
        """Returns the host and a free port."""
        return self._host, free_ports(1)[0]

    def start(self, command: Sequence[str], variables: Mapping[str, str]) -> None:
        """Starts the process with arguments for this Python; "{answer}" stands for a file.

        The variables are added to this process's environment, without Ray's.
        """
        words = [word.replace("{answer}", str(self._answer)) for word in command]
        own = {
            name: text
            for name, text in environment.snapshot().items()
            if not name.startswith(("RAY_", "TF_CONFIG"))
        }
        self._process = StreamedProcess(
            (sys.executable, *words), {**own, **variables}, lambda *one: self._messages.put(one)
        )

    def next(self, timeout_s: float) -> list[TaskMessage]:
        """Returns the messages since the last call; waits up to `timeout_s` for the first."""
        assert self._process is not None
        found: list[TaskMessage] = []
        try:
            found.append(self._messages.get(timeout=timeout_s))
            while len(found) < _MAX_MESSAGES:
                found.append(self._messages.get_nowait())
        except queue.Empty:
            pass
        if not found and (code := self._process.wait(0.0)) is not None and self._messages.empty():
            found.append(("end", str(code)))
        return found

    def answer(self) -> bytes:
        """Returns the answer that the process has written, or b""."""
        return self._answer.read_bytes() if self._answer.exists() else b""

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.end()
        self._folder.close()

    @property
    def _answer(self) -> Path:
        return self._folder.path / "answer"
