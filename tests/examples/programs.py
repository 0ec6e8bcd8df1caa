"""Runs examples as a user does, and compares their last line with the one that they promise."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

EXAMPLES = Path(__file__).parents[2] / "examples"
PROMISE = "# Expected last line: "
LAUNCHER = ("-c", "from stratagem.cli import main; main()", "launch")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
# What the test session sets for itself, and an example has to get from the library.
_SET_BY_LIBRARY = ("KERAS_BACKEND", "NPROC")
# Far beyond what an example takes: it ends one that hangs.
LIMIT_S = 900


def environment(**variables: str) -> dict[str, str]:
    """Returns the environment of a user, who sets nothing."""
    own = {key: text for key, text in os.environ.items() if key not in _SET_BY_LIBRARY}
    return own | variables


def run(
    path: Path, *arguments: str, launcher: Sequence[str] = (), cwd: Path | None = None
) -> list[str]:
    """Returns the lines that an example prints; fails where it fails."""
    finished = subprocess.run(
        [sys.executable, *launcher, str(path), *arguments],
        env=environment(),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout.splitlines()


def promised(path: Path) -> str:
    """Returns the last line that an example promises in its first."""
    first = path.read_text().splitlines()[0]
    assert first.startswith(PROMISE), f"{path.name} starts with {first!r}, not with {PROMISE!r}"
    return first.removeprefix(PROMISE)


def assert_same(line: str, expected: str) -> None:
    """Words must be equal; numbers may differ by what rounding makes of a whole training."""
    assert _NUMBER.sub("0", line) == _NUMBER.sub("0", expected)
    got = [float(number) for number in _NUMBER.findall(line)]
    np.testing.assert_allclose(got, [float(n) for n in _NUMBER.findall(expected)], rtol=0.01)
