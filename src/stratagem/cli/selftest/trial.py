"""Runs the measurements, each in a process of its own, as findings of the doctor."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator

from stratagem import environment
from stratagem.cli.doctor.findings import Finding, Level

NAMES = ("collective", "parameter_servers", "checkpoint")
_MARKER = "STRATAGEM_MEASURED"
_LIMIT_S = 120
_TOPIC = "trial"


def measure(names: Iterable[str] = NAMES, limit_s: float = _LIMIT_S) -> Iterator[Finding]:
    """Measures each; yields the speed beside that of the hardware, or why it failed."""
    for name in names:
        try:
            finished = subprocess.run(  # noqa: S603 - our own program
                [sys.executable, "-m", "stratagem.cli.selftest.measurements", name],
                capture_output=True,
                text=True,
                timeout=limit_s,
                check=False,
                env={"JAX_NUM_CPU_DEVICES": "2", **environment.snapshot_outside_cluster()},
            )
        except subprocess.TimeoutExpired:
            yield _failed(name, f"not finished after {limit_s:.0f} s")
            continue
        lines = [line for line in finished.stdout.splitlines() if line.startswith(_MARKER)]
        if finished.returncode or not lines:
            errors = [line for line in finished.stderr.splitlines() if line.strip()] or [
                "no output"
            ]
            yield _failed(name, errors[-1][:200])
            continue
        measured = json.loads(lines[-1].removeprefix(_MARKER))
        yield Finding(
            _TOPIC,
            Level.OK,
            f"{measured['what']}: {_rate(measured['bytes_per_s'])} "
            f"({measured['reference']}: {_rate(measured['reference_bytes_per_s'])}).",
        )


def _failed(name: str, reason: str) -> Finding:
    return Finding(
        _TOPIC,
        Level.ERROR,
        f"{name} failed: {reason}",
        f"run {sys.executable} -m stratagem.cli.selftest.measurements {name} for the whole error.",
    )


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2f} GB/s"
