"""What R users of TensorFlow follow, by the same calls from Python and from R, on two workers."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.multiprocess.cluster import addresses, environment, run_alone, run_cluster

_FOLDER = Path(__file__).parents[2] / "examples" / "r"
_LIMIT_S = 120


@pytest.mark.slow
def test_workers_report_what_one_process_does() -> None:
    alone = run_alone([str(_FOLDER / "digits.py")], JAX_NUM_CPU_DEVICES="1")
    assert alone.code == 0, alone.errors
    accuracy = alone.output.split()[-1]
    assert float(accuracy) > 0.85
    for ended in run_cluster([str(_FOLDER / "digits.py")], 2):
        assert ended.code == 0, ended.errors
        assert ended.output.splitlines()[-1] == f"2 replicas, validation accuracy {accuracy}"


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("Rscript") is None, reason="needs r-base-core and r-cran-reticulate"
)
def test_the_same_from_r() -> None:
    workers = addresses(2)
    processes = [
        subprocess.Popen(
            ["Rscript", str(_FOLDER / "digits.R")],
            env=environment(index, workers, RETICULATE_PYTHON=sys.executable),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(2)
    ]
    for process in processes:
        output, _ = process.communicate(timeout=_LIMIT_S)
        assert process.returncode == 0, output
        assert "2 replicas, validation accuracy 0.9" in output
