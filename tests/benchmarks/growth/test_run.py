"""The benchmark runs: each size in a process of its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks.cases import Environments
from benchmarks.growth import run, run_growth
from benchmarks.growth.axes import AXES, Axis, Cost
from benchmarks.runner import Effort

EFFORT = Effort(num_rounds=2, round_s=0.1)


def run_quickly(
    tmp_path: Path, only: str, python: Path = Path(sys.executable)
) -> tuple[dict[str, Any], bool]:
    """Returns the file that is written, and whether all went well."""
    pytest.importorskip("matplotlib")
    console, environments = Console(width=140), Environments(ours=python)
    went_well = run_growth(environments, EFFORT, console, tmp_path, only=only, is_quick=True)
    return json.loads((tmp_path / "growth.json").read_text()), went_well


@pytest.mark.slow
def test_small_sizes_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Two sizes of a busy machine may seem to grow steeply, so that the result tells nothing.
    results, _ = run_quickly(tmp_path, "replicas")
    assert results["failures"] == []
    (axis,) = (axis for axis in AXES if axis.name == "replicas")
    assert [(row["axis"], row["cost"], row["clock"]) for row in results["rows"]] == [
        ("replicas", cost.title, "elapsed") for cost in axis.costs.values()
    ]
    for row in results["rows"]:
        assert row["sizes"] == list(axis.quick_sizes)
        assert all(seconds > 0 for seconds in (*row["ours_s"], *row["by_hand_s"]))
    assert "later call" in capsys.readouterr().out
    assert (tmp_path / "growth.png").exists()


def test_failure_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results, went_well = run_quickly(tmp_path, "replicas", Path("/bin/false"))
    assert not went_well
    assert [one["case"] for one in results["failures"]] == ["1 replicas", "2 replicas"]
    assert results["rows"] == []
    assert "Failed: 2 replicas" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("only", "sizes"),
    [pytest.param("thing", (1, 2), marks=pytest.mark.slow), ("things", (1, 2, 4))],
)
def test_sizes_that_take_minutes_are_asked_for_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, only: str, sizes: tuple[int, ...]
) -> None:
    pytest.importorskip("matplotlib")
    asked: list[int] = []

    def measure(axis: Axis, size: int, *_: object, is_quick: bool) -> Any:
        asked.append(axis.question(size, is_quick=is_quick)["count"])
        return {}, {"ours": {"call_s": size / 2}}

    axis = Axis(
        name="things",
        module="nothing",
        costs={"call_s": Cost("call")},
        sizes=(1, 2),
        long_sizes=(4,),
        quick_sizes=(1,),
        argument="count",
    )
    monkeypatch.setattr(run, "AXES", (axis,))
    monkeypatch.setattr(run, "_measure", measure)
    assert run_growth(Environments(), EFFORT, Console(), tmp_path, only=only)
    assert tuple(asked) == sizes
    (row,) = json.loads((tmp_path / "growth.json").read_text())["rows"]
    assert row["exponents"] == [pytest.approx(1)]
