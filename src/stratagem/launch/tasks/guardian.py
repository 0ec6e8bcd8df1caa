"""Guardian process: kills the tasks that a killed launcher leaves behind.

It learns from a pipe which process groups start and end, and kills the remaining ones when the pipe
breaks. It runs as a file, without the package, so that it is small and starts at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

_EXIT_S = 5.0


class Guardian:
    """Kills process groups if this process ends without having done so."""

    def __init__(self) -> None:
        # In a separate session, so that killing the launcher's group does not kill it.
        self._process = subprocess.Popen(  # noqa: S603 - our own program
            (sys.executable, "-I", "-S", __file__),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def __enter__(self) -> Guardian:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kills the groups that were not forgotten, and ends the guardian."""
        if self._process.returncode is not None:
            return
        try:
            self._process.communicate(timeout=_EXIT_S)
        except subprocess.TimeoutExpired:  # it was stopped, and is no longer needed
            self._process.kill()
            self._process.communicate()

    @property
    def pid(self) -> int:
        """Process id of the guardian."""
        return self._process.pid

    def watch(self, group: int) -> None:
        """Adds a process group to kill."""
        self._write(f"+{group}\n")

    def forget(self, group: int) -> None:
        """Removes a process group that has ended."""
        self._write(f"-{group}\n")

    def _write(self, line: str) -> None:
        pipe = self._process.stdin
        # A launch survives the death of its guardian: each task is still tied to the launcher.
        with contextlib.suppress(BrokenPipeError):
            if pipe is not None:
                os.write(pipe.fileno(), line.encode())


def _main() -> None:
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        change = groups.add if line[0] == "+" else groups.discard
        change(int(line[1:]))
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    _main()
