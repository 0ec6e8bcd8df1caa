"""Checks of a real GPU: their register, their device, and the folder of their figures.

Each check runs in a process of its own, so that none can keep another one's memory or time:
`python -m validation.gpu NAME ...` starts them, several at once.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = [
    "CHECKS",
    "Check",
    "check",
    "device",
    "has_passed",
    "is_on_cpu",
    "loaded",
    "results_folder",
    "save",
]

ROOT = Path(__file__).parents[2]


@dataclasses.dataclass(frozen=True)
class Check:
    """One check.

    Args:
        name: its name on the command line and in the results.
        run: the function; it returns figures, and raises an error if the check fails.
        timeout_s: when its process is ended.
        priority: those of small numbers start first.
        is_alone: True if it needs the whole GPU or host memory; not part of the default run.
        environment: variables of its process.
    """

    name: str
    run: Callable[[], dict[str, Any]]
    timeout_s: float
    priority: int
    is_alone: bool
    environment: dict[str, str]


CHECKS: dict[str, Check] = {}


def check(
    *, timeout_s: float = 100, priority: int = 2, is_alone: bool = False, **environment: str
) -> Callable[[Callable[[], dict[str, Any]]], Callable[[], dict[str, Any]]]:
    """Registers a function as a check under its own name."""

    def register(run: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
        name = run.__name__
        CHECKS[name] = Check(name, run, timeout_s, priority, is_alone, environment)
        return run

    return register


def is_on_cpu() -> bool:
    """True for a dry run: the same checks on a CPU device, in small sizes."""
    return os.environ.get("STRATAGEM_GPU_CHECKS_ON") == "cpu"


def device() -> str:
    """The device that is checked."""
    return "cpu:0" if is_on_cpu() else "gpu:0"


def environment_of(one: Check) -> dict[str, str]:
    """What the process of a check finds in its environment."""
    return {
        **os.environ,
        "KERAS_BACKEND": "jax",
        "JAX_PLATFORMS": "cpu" if is_on_cpu() else "cuda,cpu",
        "JAX_NUM_CPU_DEVICES": "2",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
        **one.environment,
    }


def results_folder() -> Path:
    """The folder of the results."""
    folder = Path(os.environ.get("STRATAGEM_GPU_RESULTS", ROOT / "build" / "gpu-checks"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def save(name: str, result: dict[str, Any]) -> None:
    """Writes the result of a check."""
    path = results_folder() / f"{name}.json"
    path.write_text(json.dumps(result, indent=1, default=str), encoding="utf-8")


def loaded(name: str) -> dict[str, Any]:
    """Returns the result of a check."""
    return json.loads((results_folder() / f"{name}.json").read_text(encoding="utf-8"))


def has_passed(name: str) -> bool:
    """Returns True if an earlier run of the check has passed."""
    return (results_folder() / f"{name}.json").is_file() and bool(loaded(name)["passed"])
