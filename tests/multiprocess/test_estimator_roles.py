"""An Estimator's training on two workers with an evaluator beside them, from one script."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.multiprocess.cluster import PROGRAMS

_LIMIT_S = 180
_LAUNCH = [sys.executable, "-c", "from stratagem.cli import main; main()", "launch"]


def loss_in_numpy(num_steps: int) -> float:
    """Gradient descent on 8 rows a step: 4 of the even ones and 4 of the odd ones, in order."""
    x = np.random.default_rng(7).normal(size=(32, 3)).astype("float32")
    y = x @ np.array([1.0, -2.0, 0.5])
    kernel, bias = np.zeros(3), 0.0
    for step in range(num_steps):
        rows = np.arange(8 * step, 8 * step + 8) % 32
        error = x[rows] @ kernel + bias - y[rows]
        kernel, bias = kernel - 0.05 * 2 * x[rows].T @ error / 8, bias - 0.05 * 2 * error.mean()
    return float(np.mean((x @ kernel + bias - y) ** 2))


@pytest.mark.slow
def test_workers_end_together_and_the_evaluator_measures_their_last_checkpoint(
    tmp_path: Path,
) -> None:
    command = [*_LAUNCH, "--workers", "2", "--evaluator", "--evaluator-grace-s", "0"]
    ended = subprocess.run(
        [*command, "--grace-s", "60", str(PROGRAMS / "estimator_roles.py"), tmp_path],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "KERAS_BACKEND": "jax"},
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
    )
    assert ended.returncode == 0, ended.stderr
    names = ("worker0", "worker1", "evaluator0")
    chief, worker, evaluator = (json.loads((tmp_path / f"{n}.json").read_text()) for n in names)
    assert chief == {"metrics": None, "last step": 30, "questions": 30}
    assert worker == {"metrics": None, "last step": 30, "questions": 0}
    assert evaluator["questions"] == 0
    assert evaluator["metrics"]["global_step"] == 30
    assert evaluator["metrics"]["loss"] == pytest.approx(loss_in_numpy(30), rel=1e-4)
