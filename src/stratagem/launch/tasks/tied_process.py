"""A program that becomes another one, which the system kills when the launcher dies.

It runs as a file, alone, so that nothing of the package is loaded in between. A `preexec_fn` would
run Python between fork and exec, which can hang where the launching process has threads.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

__all__ = ["tie", "tied_command"]

# From Linux's prctl.h.
_PR_SET_PDEATHSIG = 1
_NOT_FOUND = 127
_NOT_EXECUTABLE = 126


def tied_command(command: Sequence[str]) -> tuple[str, ...]:
    """Returns the command that runs another one tied to this process.

    The tie is to the thread that starts it: that thread must outlive the task.

    Args:
        command: the program and its arguments.

    Returns:
        A longer command, which becomes the other by exec.
    """
    return (sys.executable, "-I", "-S", __file__, str(os.getpid()), *command)


def tie(launcher: int) -> None:
    """Lets the system kill this process when the one that started it dies; on Linux.

    Args:
        launcher: the id of that one.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The launcher may have died before the call.
    if os.getppid() != launcher:
        signal.raise_signal(signal.SIGKILL)


def _main() -> None:
    tie(int(sys.argv[1]))
    # This interpreter ignores them for itself, and exec would hand that on.
    for signum in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(signum, signal.SIG_DFL)
    command = sys.argv[2:]
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"Cannot run {command[0]}: {error.strerror}", file=sys.stderr)
        raise SystemExit(
            _NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_EXECUTABLE
        ) from None


if __name__ == "__main__":
    _main()
