"""Program in a session of its own, of whose processes none outlives this one."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from stratagem.launch.tasks.guardian import Guardian
from stratagem.launch.tasks.tied_process import tied_command
from stratagem.resources import Closing


class Session(Closing):
    """Runs a program that ends with this process, and with it the processes that it starts.

    `variables` are its environment, `streams` its "stdout" and "stderr" as for `subprocess.Popen`.
    Raises OSError if the system cannot start another process.
    """

    def __init__(
        self, command: Sequence[str], variables: Mapping[str, str], **streams: Any
    ) -> None:
        self._guardian = Guardian()
        self._closing = threading.Lock()
        made: queue.SimpleQueue[Any] = queue.SimpleQueue()

        def keep() -> None:
            # The kernel ties a program to the thread that starts it.
            try:
                process = subprocess.Popen(  # noqa: S603 - our own command, or the user's
                    tied_command(command),
                    env=variables,
                    stdin=subprocess.DEVNULL,
                    bufsize=0,
                    start_new_session=True,
                    **streams,
                )
            except OSError as error:
                made.put(error)
                return
            made.put(process)
            process.wait()

        threading.Thread(target=keep, name=f"session of {command[0]}", daemon=True).start()
        started = made.get()
        if isinstance(started, OSError):
            self._guardian.close()
            raise started
        self.process: subprocess.Popen[bytes] = started
        self._guardian.watch(started.pid)

    def has_ended(self, timeout_s: float = 0.0) -> bool:
        """Waits for the end of the program; returns False after the timeout."""
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def end(self, grace_s: float) -> None:
        """Sends SIGTERM to the program, and SIGKILL after `grace_s`."""
        self.process.send_signal(signal.SIGTERM)
        if not self.has_ended(grace_s):
            self.process.kill()

    def close(self) -> None:
        """Kills what is left of the session."""
        with self._closing:  # whoever reads its output also closes it at its end
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self._guardian.close()
