"""The runner of the GPU benchmarks: budget, limits, failures, and what is written when."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.gpu.runner import Plan, run_sides
from benchmarks.gpu.sides import GpuSide


def _side(name: str, behavior: str, **fields: Any) -> GpuSide:
    given: dict[str, Any] = {"estimate_s": 1.0, "device_gb": 1.0, "options": {}, "priority": 1}
    return GpuSide(
        workload="mlp",
        name=name,
        program="tests.benchmarks.gpu.fake_side",
        variables={"FAKE_BEHAVIOR": behavior},
        **(given | fields),
    )


def _plan(folder: Path, **fields: Any) -> Plan:
    return Plan(**({"folder": folder, "cache": folder / "cache", "budget_s": 60.0} | fields))


def _run(sides: list[GpuSide], plan: Plan) -> dict[str, Any]:
    lines: list[str] = []
    run_sides(sides, plan, lines.append)
    assert len(lines) == len(sides)
    results = json.loads((plan.folder / "results.json").read_text(encoding="utf-8"))
    return {row["name"]: row for row in results["sides"]}


def test_a_failure_keeps_its_figures_and_its_reason_and_the_others_go_on(tmp_path: Path) -> None:
    sides = [_side("bad", "fails"), _side("good", "ends", options={"steps_per_call": 7})]
    rows = _run(sides, _plan(tmp_path))
    assert rows["bad"]["status"] == "failed with exit code 1"
    assert rows["bad"]["first_loss"] == 2.5
    assert "the reason of the failure" in rows["bad"]["error"]
    assert rows["good"]["status"] == "done"
    assert rows["good"]["steps_per_call"] == 7
    assert rows["good"]["num_rounds"] == 3


def test_a_side_that_hangs_is_ended_and_keeps_its_figures(tmp_path: Path) -> None:
    rows = _run([_side("slow", "hangs")], _plan(tmp_path, side_limit_s=4.0))
    assert rows["slow"]["status"] == "ended after its limit of 4 s, stage: first step"
    assert rows["slow"]["first_loss"] == 2.5


def test_a_side_that_no_longer_fits_is_skipped_and_a_shorter_one_is_not(tmp_path: Path) -> None:
    sides = [_side("long", "ends", estimate_s=100.0), _side("short", "ends")]
    rows = _run(sides, _plan(tmp_path))
    assert rows["long"]["status"] == "skipped: 60 s left, needs about 100 s"
    assert rows["short"]["status"] == "done"


def test_a_cold_side_has_a_cache_of_its_own_and_no_rounds(tmp_path: Path) -> None:
    rows = _run([_side("cold", "ends", is_cold=True)], _plan(tmp_path))
    assert rows["cold"]["num_rounds"] == 0
    assert Path(rows["cold"]["cache"]).is_relative_to(tmp_path / "cold")


def test_sides_at_once_share_the_memory_of_the_device(tmp_path: Path) -> None:
    sides = [_side(name, "ends", device_gb=50.0) for name in ("first", "second")]
    rows = _run(sides, _plan(tmp_path, at_once=8))
    assert [row["status"] for row in rows.values()] == ["done", "done"]


def test_what_was_measured_before_is_kept_and_the_rest_is_measured(tmp_path: Path) -> None:
    first = _run([_side("a", "ends"), _side("b", "fails")], _plan(tmp_path))
    assert first["b"]["status"] != "done"
    sides = [_side("a", "fails"), _side("b", "ends"), _side("c", "ends")]
    lines: list[str] = []
    results = run_sides(sides, _plan(tmp_path, resumes=True), lines.append)
    assert len(lines) == 2
    rows = {row["name"]: row for row in results["sides"]}
    assert [rows[name]["status"] for name in "abc"] == ["done"] * 3
    assert rows["a"] == first["a"]


def test_with_a_gate_sides_that_wait_take_only_what_they_prepared(tmp_path: Path) -> None:
    sides = [
        _side(name, "waits", device_gb=60.0, prepared_gb=10.0, options={"folder": str(tmp_path)})
        for name in ("first", "second")
    ]
    rows = _run(sides, _plan(tmp_path, at_once=2, is_gated=True, device_gb=70.0))
    assert [row["status"] for row in rows.values()] == ["done", "done"]
    rows = _run(sides[:1], _plan(tmp_path, side_limit_s=1.0, is_gated=True, device_gb=70.0))
    assert rows["first"]["status"].startswith("ended after its limit")
