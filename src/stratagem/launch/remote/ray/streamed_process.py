"""Process whose output goes to a callback; it ends with the process that started it."""

from __future__ import annotations

import codecs
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from stratagem import environment
from stratagem.cluster.addresses import free_ports
from stratagem.launch.tasks.guardian import Guardian
from stratagem.launch.tasks.tied_process import tied_command
from stratagem.resources import Closing, TemporaryFolder

_READ_BYTES = 2**16
_GRACE_S = 10.0


class StreamedProcess(Closing):
    """A process that ends with this one, together with the processes that it starts.

    `variables` are its whole environment. `on_output` is called from other threads with "out" or
    "err" and a text. None for `folder` means this process's working directory.
    """

    def __init__(
        self,
        command: Sequence[str],
        variables: Mapping[str, str],
        on_output: Callable[[str, str], None],
        folder: str | None = None,
    ) -> None:
        self._on_output = on_output
        self._is_running = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._error: OSError | None = None
        self._start = (tuple(command), dict(variables), folder)
        # The process is tied to the thread that starts it.
        self._keeper = threading.Thread(target=self._run, name="task process", daemon=True)
        self._keeper.start()
        self._is_running.wait()
        if self._error is not None:
            raise self._error

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Waits for exit code and output; negative for a signal, None after the timeout."""
        self._keeper.join(timeout_s)
        if self._keeper.is_alive() or self._process is None:
            return None
        return self._process.returncode

    def end(self, grace_s: float = _GRACE_S) -> None:
        """Sends SIGTERM, and SIGKILL after `grace_s` seconds."""
        if self._process is not None and self._keeper.is_alive():
            self._process.send_signal(signal.SIGTERM)
            if self.wait(grace_s) is None:
                self._process.kill()

    def close(self) -> None:
        """Ends the process and waits for it."""
        self.end()
        self._keeper.join()

    def _run(self) -> None:
        command, variables, folder = self._start
        with Guardian() as guardian:
            try:
                self._process = process = subprocess.Popen(  # noqa: S603 - the user's command
                    tied_command(command),
                    env=variables,
                    cwd=folder,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    start_new_session=True,
                )
            except OSError as error:
                self._error = error
                self._is_running.set()
                return
            guardian.watch(process.pid)
            self._is_running.set()
            pumps = [
                threading.Thread(target=self._pump, args=(kind, pipe), daemon=True)
                for kind, pipe in (("out", process.stdout), ("err", process.stderr))
            ]
            for pump in pumps:
                pump.start()
            process.wait()
            _kill_group(process.pid)  # else its children would hold its output open
            for pump in pumps:
                pump.join()
            guardian.forget(process.pid)

    def _pump(self, kind: str, pipe: IO[bytes] | None) -> None:
        assert pipe is not None
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        with pipe:
            while data := os.read(pipe.fileno(), _READ_BYTES):
                if text := decoder.decode(data):
                    self._on_output(kind, text)


def _kill_group(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


# Ray actor that runs one task of a job on the task's machine.

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
