"""A process that outlives the launcher just long enough to end what it has left.

The launcher can be killed in a way that lets it do nothing more. The guardian holds the other end
of a pipe, is told each process group that starts and ends, and kills those that are left when the
pipe breaks. It runs as a file, alone, so that it is small and starts at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from types import TracebackType

__all__ = ["Guardian"]


class Guardian:
    """Kills the process groups of tasks if this process ends without doing so itself.

    Example:
        >>> with Guardian() as guardian:
        ...     guardian.watch(12345)
        ...     guardian.forget(12345)
    """

    def __enter__(self) -> Guardian:
        # A session of its own: what kills the launcher's group does not kill it.
        self._process = subprocess.Popen(
            (sys.executable, "-I", "-S", __file__),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._process.communicate()

    @property
    def pid(self) -> int:
        """The id of its process."""
        return self._process.pid

    def watch(self, group: int) -> None:
        """Takes a process group under its care.

        Args:
            group: the group's id.
        """
        self._tell(f"+{group}\n")

    def forget(self, group: int) -> None:
        """Leaves alone a group of which nothing runs any more.

        Args:
            group: the group's id.
        """
        self._tell(f"-{group}\n")

    def _tell(self, line: str) -> None:
        pipe = self._process.stdin
        # A guardian that was killed itself is no reason to fail: the tie to each task is left.
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
