"""Folders: that of an argument, and that of compiled programs."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
from pathlib import Path

from stratagem.messages import explain


def checked_folder(name: str, folder: str | os.PathLike[str]) -> str:
    """Returns a folder's path; raises ValueError if it is empty, as an unset variable is.

    `name` is the argument's name for the message.
    """
    path = os.fspath(folder)
    if not path:
        raise ValueError(
            explain(
                f"{name}={folder!r} is empty.",
                expected="the path of a folder.",
                fix='pass a path; "." is the current folder.',
            )
        )
    return path


def programs_folder(cache_dir: Path) -> Path:
    """Returns the folder of programs that were compiled for this machine's CPU; it may not exist.

    Programs for a CPU use the instruction sets of the machine that compiled them, and a home folder
    can be shared by several machines.
    """
    return cache_dir / "programs" / hashlib.sha256(_cpu().encode()).hexdigest()[:12]


@functools.cache
def _cpu() -> str:
    """Returns the architecture and the instruction sets of the CPU."""
    flags = ""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()} {flags or platform.processor()}"
