"""The benchmark of plans, run as it is: planned for eight GPUs, measured on what is here."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from benchmarks.cases import Environments
from benchmarks.plan import run_plan
from benchmarks.runner import Effort


@pytest.mark.slow
def test_plan_agrees_with_what_is_measured_here(tmp_path) -> None:
    console = Console(file=io.StringIO(), width=200)
    assert run_plan(Environments(), Effort(), console, tmp_path, is_quick=True)
    (row,) = json.loads((tmp_path / "plan.json").read_text())["rows"]
    assert row["workload"] == "MLP"
    # An MLP of 235,146 parameters, Adam's moments, and a few counters.
    assert row["planned_state_bytes"] == pytest.approx(3 * 4 * 235_146, abs=100)
    assert row["state_ratio"] == pytest.approx(1, abs=0.01)
