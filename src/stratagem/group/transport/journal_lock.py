"""Lock that gives one process at a time the right to write a journal."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from pathlib import Path

from stratagem import settings
from stratagem.errors import UnavailableError, explain
from stratagem.resources import Closing

if sys.platform != "win32":
    import fcntl


_POLL_S = 0.05


class JournalLock(Closing):
    """Waits for and holds an exclusive lock, because a lost server may take a moment to exit.

    The lock is a separate file, because the journal file gets replaced. The operating system
    releases it when the process exits. No-op on Windows. Creates the folder of `path`.

    Raises:
        UnavailableError: another process holds it for longer than `STRATAGEM_PEER_TIMEOUT_S`.
        OSError: the file cannot be opened, or the file system does not support locks.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            self._wait()
            os.ftruncate(self._descriptor, 0)
            os.pwrite(
                self._descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0
            )
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Releases the lock."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _wait(self) -> None:
        limit_s = float(settings.read("peer_timeout_s"))
        deadline_s = time.monotonic() + limit_s
        while not self._try():
            if time.monotonic() > deadline_s:
                raise UnavailableError(
                    explain(
                        f"{self._path.with_suffix('')} is in use by {self._path.read_text()}, and "
                        f"was not released within {limit_s:g} s.",
                        expected="one server per journal; the previous server must have exited.",
                        fix="stop that process, or start the servers with another journal_dir. "
                        "Set STRATAGEM_PEER_TIMEOUT_S to change the limit.",
                        code="SG610",
                    )
                )
            threading.Event().wait(_POLL_S)

    def _try(self) -> bool:
        if sys.platform != "win32":
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            return False
        return True
