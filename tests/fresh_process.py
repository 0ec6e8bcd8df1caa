"""Programs in an interpreter of their own: for what is decided once in a process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_TIMEOUT_S = 120


def run_fresh(program: str, *, folder: Path | None = None, **environment: str | None) -> list[str]:
    """Runs a program in a fresh interpreter and returns the lines that it prints.

    Args:
        program: text of the program; it must end without an error.
        folder: working folder, the first place where the program's imports are looked for.
        **environment: variables to set beside those of this process; None removes one.
    """
    merged = {**os.environ, **environment}
    process = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        cwd=folder,
        env={name: value for name, value in merged.items() if value is not None},
    )
    assert process.returncode == 0, process.stderr
    return process.stdout.splitlines()
