"""The benchmark runs: each size in a process of its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.cases import Environments
from benchmarks.growth import run_growth
from benchmarks.growth.axes import AXES, COSTS
from benchmarks.runner import Effort

EFFORT = Effort(num_rounds=2, round_s=0.1)


def test_small_sizes_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    environments = Environments(ours=Path(sys.executable))
    # Two sizes of a busy machine may seem to grow steeply, so that the result tells nothing.
    run_growth(environments, EFFORT, Console(width=120), tmp_path, only="replicas", is_quick=True)
    results = json.loads((tmp_path / "growth.json").read_text())
    assert results["failures"] == []
    (axis,) = (axis for axis in AXES if axis.name == "replicas")
    assert [(row["axis"], row["cost"]) for row in results["rows"]] == [
        ("replicas", cost) for cost in COSTS
    ]
    for row in results["rows"]:
        assert row["sizes"] == list(axis.quick_sizes)
        assert all(seconds > 0 for seconds in (*row["ours_s"], *row["by_hand_s"]))
    assert "later call" in capsys.readouterr().out
    assert (tmp_path / "growth.png").exists()


def test_failure_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = Environments(ours=Path("/bin/false"))
    console = Console(width=120)
    assert not run_growth(missing, EFFORT, console, tmp_path, only="replicas", is_quick=True)
    results = json.loads((tmp_path / "growth.json").read_text())
    assert [one["case"] for one in results["failures"]] == ["1 replicas", "2 replicas"]
    assert results["rows"] == []
    assert "Failed: 2 replicas" in capsys.readouterr().out
