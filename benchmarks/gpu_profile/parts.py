"""Parts of a measurement, each a process with a time limit, whose failure stops no other."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

__all__ = ["Part", "run_parts"]

_REPOSITORY = Path(__file__).parents[2]


@dataclasses.dataclass(frozen=True)
class Part:
    """A program of Python.

    Args:
        name: of its log.
        arguments: of the interpreter.
        limit_s: after which it is ended.
    """

    name: str
    arguments: Sequence[str]
    limit_s: float


def run_parts(parts: Sequence[Part], output: Path, *, at_once: int = 1) -> dict[str, int | str]:
    """Runs parts, writes their logs and a table of their ends, and returns the exit codes.

    Args:
        parts: to run.
        output: folder of the logs.
        at_once: how many run at the same time.
    """
    ends: dict[str, int | str] = {}

    def run(part: Part) -> None:
        begin_s = time.perf_counter()
        ends[part.name] = _run_part(part, output)
        seconds = time.perf_counter() - begin_s
        print(f"{part.name}: {ends[part.name]} after {seconds:.1f} s", flush=True)

    with ThreadPoolExecutor(at_once) as threads:
        list(threads.map(run, parts))
    path = output / "parts.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(known | ends, indent=1))
    return ends


def _run_part(part: Part, output: Path) -> int | str:
    environment = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": os.environ.get(
            "JAX_COMPILATION_CACHE_DIR", str(output / ".." / "gpu-programs")
        ),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "TF_CPP_MIN_LOG_LEVEL": "1",
        "KERAS_BACKEND": "jax",
    }
    with (output / f"{part.name}.log").open("w") as log:
        try:
            return subprocess.run(
                [sys.executable, *part.arguments],
                cwd=_REPOSITORY,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=part.limit_s,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            return f"ended after {part.limit_s:g} s"
