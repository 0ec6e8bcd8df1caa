"""Models as a user trains them: to a stated part of the best possible quality."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from examples.recommenders.__main__ import EFFORTS
from tests.examples.programs import environment

pytestmark = pytest.mark.slow

_ROOT = Path(__file__).parents[3]
_LIMIT_S = 1_800


def _run(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=_ROOT,
        env=environment(XLA_FLAGS="--xla_force_host_platform_device_count=2"),
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )


def test_another_model_is_refused() -> None:
    finished = _run("examples.recommenders", "perceptron")
    assert finished.returncode == 2
    assert "invalid choice: 'perceptron'" in finished.stderr


@pytest.mark.parametrize(
    ("model", "strategy"),
    [
        ("dlrm", "servers"),
        ("dcn", "servers"),
        ("drift", "servers"),
        ("two_towers", "hybrid"),
        ("sessions", "servers"),
    ],
)
def test_models_reach_a_part_of_the_best_quality(model: str, strategy: str) -> None:
    finished = _run("examples.recommenders", model, "--strategy", strategy)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    (share,) = re.findall(r"([\d.]+)% of the best", finished.stdout)
    assert float(share) >= 100 * EFFORTS[model][1]
    if model == "drift":  # rows of items that are gone
        (evicted,) = re.findall(r"([\d,]+) evicted", finished.stdout)
        assert int(evicted.replace(",", "")) > 1_000


def test_keyed_tables_have_the_auc_of_keras_alone(tmp_path) -> None:
    finished = _run("examples.recommenders.compare", "dlrm", "--output", str(tmp_path))
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert (tmp_path / "dlrm.png").read_bytes().startswith(b"\x89PNG")
