"""The right to write a journal: of one process at a time, until it ends, however that is."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from pathlib import Path

from stratagem import environment
from stratagem.closing import Closing
from stratagem.errors import UnavailableError
from stratagem.messages import explain

if sys.platform != "win32":
    import fcntl

__all__ = ["JournalLock"]

_POLL_S = 0.05


class JournalLock(Closing):
    """Waits until no other process has the lock: a server that is lost may take a moment to end.

    It is a file of its own, because that of a journal is replaced; the system gives it free when
    the process ends. Windows has no such locks, and nothing is done there.

    Args:
        path: of the file; its folder is made.

    Raises:
        UnavailableError: another process has it for `STRATAGEM_PEER_TIMEOUT_S`.
        OSError: the file cannot be opened, or its file system has no locks.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
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
        """Lets the next process have it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _wait(self) -> None:
        limit_s = float(environment.read("peer_timeout_s"))
        deadline_s = time.monotonic() + limit_s
        while not self._try():
            if time.monotonic() > deadline_s:
                raise UnavailableError(
                    explain(
                        f"{self._path.with_suffix('')} is in use by {self._path.read_text()}, for "
                        f"{limit_s:g} s now.",
                        expected="one server for each journal, and the one before to have ended.",
                        fix="end that process, or start the servers with another journal_dir; "
                        "STRATAGEM_PEER_TIMEOUT_S changes the limit.",
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
