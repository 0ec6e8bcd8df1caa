"""Scripts of `stratagem slurm render` for the programs of these tests, and results of jobs."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from stratagem.cli.manifests.rendering import render_slurm

__all__ = ["log_of", "script_of", "wait_for", "weights"]

_PROGRAMS = Path(__file__).parent / "programs"
_DEADLINE_S = 400


def script_of(program: str, *arguments: str, **overrides: object) -> str:
    """Returns a rendered script that runs a program of these tests."""
    given = {
        "name": "digits",
        "num_gpus_per_worker": 0,
        "python": sys.executable,
        "script": str(_PROGRAMS / program),
        "cmdline_args": [*arguments],
        "grace_period_s": 30,
        **overrides,
    }
    return render_slurm(given)


def log_of(folder: Path, job: str) -> str:
    """Returns what a job has printed."""
    path = folder / f"digits-{job}.log"
    return path.read_text() if path.exists() else ""


def weights(folder: Path, ranks: int) -> list[bytes]:
    """Returns the bits of the weights that each rank has at the end."""
    return [np.load(folder / f"rank-{rank}.npy").tobytes() for rank in range(ranks)]


def wait_for(is_so: Callable[[], bool], explained: Callable[[], str]) -> None:
    """Waits until something is so; fails with an explanation."""
    deadline_s = time.monotonic() + _DEADLINE_S
    while not is_so():
        assert time.monotonic() < deadline_s, explained()
        time.sleep(0.1)
