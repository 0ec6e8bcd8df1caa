"""An evaluator beside two workers, all started by the launcher from one script."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.multiprocess.cluster import PROGRAMS

_LIMIT_S = 120
_NUM_EPOCHS = 3
_LAUNCH = [sys.executable, "-c", "from stratagem.cli import main; main()", "launch"]


@pytest.mark.slow
def test_evaluator_measures_what_the_workers_do_up_to_the_last_checkpoint(tmp_path: Path) -> None:
    """The evaluator is told to end as soon as the workers have, whatever it is at."""
    command = [*_LAUNCH, "--workers", "2", "--evaluator", "--evaluator-grace-s", "0"]
    ended = subprocess.run(
        [*command, "--grace-s", "60", str(PROGRAMS / "evaluated.py"), tmp_path, str(_NUM_EPOCHS)],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "KERAS_BACKEND": "jax"},
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
    )
    assert ended.returncode == 0, ended.stderr
    trained = json.loads((tmp_path / "trainer.json").read_text())
    report = json.loads((tmp_path / "evaluator.json").read_text())
    assert report["was stopped"]
    epochs = [one["epoch"] for one in report["evaluations"]]
    assert (epochs[0], epochs[-1]) == (1, _NUM_EPOCHS)
    for one in report["evaluations"]:
        assert one["step"] == 10 * one["epoch"]
        for name in ("loss", "accuracy"):
            expected = trained[f"val_{name}"][one["epoch"] - 1]
            assert one[name] == pytest.approx(expected, rel=1e-5), (one["epoch"], name)
        assert f"[evaluator 0] ckpt-{one['epoch']:04d}.weights.h5: loss " in ended.stdout
