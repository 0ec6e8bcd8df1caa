"""Compares programs under a strategy with what plain Keras makes of the same programs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import stratagem as sg
from validation.third_party.programs.measuring import Place, Program, run_program

Numbers = Mapping[str, np.ndarray]

# Of a few steps in float32; one device and several add up in another order.
_TOLERANCE = 1e-5
_TIMEOUT_S = 900
_ROOT = Path(__file__).parents[2]


def plain_numbers(module_name: str, folder: Path) -> dict[str, Numbers]:
    """Runs all programs of a module in a process without Stratagem.

    Returns:
        By program and quantity, what was measured.
    """
    path = folder / f"{module_name}.npz"
    command = [sys.executable, "-m", "validation.third_party.plain_keras", module_name, str(path)]
    done = subprocess.run(
        command, cwd=_ROOT, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    numbers: dict[str, dict[str, np.ndarray]] = {}
    with np.load(path) as measured:
        for name in measured:
            program, key = name.split("/", 1)
            numbers.setdefault(program, {})[key] = measured[name]
    return numbers


def assert_like_plain_keras(
    program: Program, strategy: Any, expected: Numbers, *, tolerance: float = _TOLERANCE
) -> None:
    """Runs a program under a strategy; all that it measures must be as expected."""
    measured = run_program(program, Place(strategy.scope, strategy))
    assert expected
    assert measured.keys() == expected.keys()
    served = isinstance(strategy, sg.ParameterServerStrategy)
    found = (
        _difference(measured[key], expected[key], key, tolerance)
        for key in expected
        if not (served and "seed_generator_state" in key)  # each worker has its own
    )
    wrong = [line for line in found if line]
    assert not wrong, "\n".join(wrong)


def _difference(
    measured: np.ndarray, expected: np.ndarray, name: str, tolerance: float
) -> str | None:
    """A line that says what differs, or None; tokens, ids and texts must be equal."""
    if measured.shape != expected.shape:
        return f"{name}: shape {measured.shape}, expected {expected.shape}"
    if measured.dtype.kind != "f":
        is_same = bool(np.all(measured == expected))
    else:
        is_same = np.allclose(measured, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
    if is_same:
        return None
    return f"{name}: {measured.ravel()[:4]}, expected {expected.ravel()[:4]}"
