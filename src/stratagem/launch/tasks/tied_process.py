"""Parent-death signal: programs that the kernel kills when their launcher dies.

This file runs as a program, without the package: it ties itself to its parent, then becomes another
program. A `preexec_fn` could hang if the launcher has threads, as it runs Python after the fork.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

# From Linux's prctl.h.
_PR_SET_PDEATHSIG = 1
_NOT_FOUND = 127
_NOT_EXECUTABLE = 126


def tied_command(command: Sequence[str]) -> tuple[str, ...]:
    """Returns a command that ties itself to the calling process, then becomes `command`.

    The tie is to the thread that starts it: that thread must outlive the program.
    """
    return (sys.executable, "-I", "-S", __file__, str(os.getpid()), *command)


def tie(launcher: int) -> None:
    """On Linux, has the kernel kill this process when its parent, `launcher`, dies."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The launcher may already be dead.
    if os.getppid() != launcher:
        signal.raise_signal(signal.SIGKILL)


def _main() -> None:
    tie(int(sys.argv[1]))
    # Python ignores these, and exec would pass that on.
    for signum in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(signum, signal.SIG_DFL)
    command = sys.argv[2:]
    try:
        os.execvp(command[0], command)  # noqa: S606 - the command that the user gave
    except OSError as error:
        print(f"Cannot run {command[0]}: {error.strerror}", file=sys.stderr)
        raise SystemExit(
            _NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_EXECUTABLE
        ) from None


if __name__ == "__main__":
    _main()
