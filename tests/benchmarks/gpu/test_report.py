"""The report of the GPU benchmarks, from recorded figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.report import main, speed_rows
from benchmarks.gpu.sides import SIDES
from benchmarks.gpu.wanted import WANTED, reached

_FIGURES = {
    "mlp-fit-100-a-call": ([9000.0, 9100.0, 8800.0], 1, None),
    "mlp-keras-fit-1-a-call": ([900.0, 1000.0, 880.0], 1, None),
    "gpt-fit-4-a-call": ([16.0, 17.0, 16.5], 8192, 2e13),
    "gpt-jax-scan-by-hand-4-a-call": ([16.5, 16.6, 16.7], 8192, 2e13),
    "llama1b-fit-4-a-call": ([3.0, 3.1, 2.9], 16384, 1.5e14),
    "llama1b-torch-compile": ([2.0, 2.0, 2.1], 16384, 1.5e14),
}


def _row(key: str) -> dict[str, Any]:
    side = next(side for side in SIDES if side.key == key)
    row: dict[str, Any] = {"workload": side.workload, "name": side.name, "key": key}
    return row | {"is_ours": side.is_ours, "is_cold": False, "status": "done"}


def _sample() -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    for key, (speeds, units, flops) in _FIGURES.items():
        rows.append(_row(key))
        rows[-1] |= {"steps_per_s": speeds, "units_per_step": units, "flops_per_step": flops}
        rows[-1] |= {"first_loss": 2.33, "last_loss": 1.2, "device_kind": "NVIDIA H100 80GB HBM3"}
        rows[-1] |= {"first_step_s": 12.3, "first_call_s": 4.5, "peak_bytes": 3_210_000_000}
    save = {"step_s": 0.01, "stall_s": 0.15, "longest_step_s": 0.2, "delay_s": 0.3}
    save |= {"whole_s": 9.0, "is_written": True, "state_bytes": 10**10}
    rows.append(_row("checkpoint-asynchronous-save") | {"saves": [save | {"stall_s": 2.0}, save]})
    rows.append(_row("bert-fit-10-a-call") | {"status": "skipped: 3 s left, needs about 20 s"})
    return {"sides": rows}


def test_speeds_count_units_and_the_share_of_peak() -> None:
    ours, scan = speed_rows(_sample(), "gpt")
    assert ours["is_ours"]
    assert ours["median"] == 16.5 * 8192
    assert ours["mfu"] == pytest.approx(16.5 * 2e13 / 989e12)
    assert scan["median"] == 16.6 * 8192
    assert speed_rows(_sample(), "mlp")[0]["mfu"] is None


def test_goals_are_met_or_not_or_unmeasured() -> None:
    found = {goal.title: reached(goal, _sample()) for goal in WANTED}
    keras = found["MLP: fit, 100 a call, over Keras fit"]
    assert keras.value == 10.0
    assert keras.is_met
    scan = found["GPT: fit over the scan"]
    assert scan.value == pytest.approx(16.5 / 16.6)
    assert scan.is_met
    stall = found["Checkpoint of 10 GB: stall of a step, s"]
    assert stall.value == 0.15
    assert stall.is_met
    assert found["Llama 1B: fit over torch.compile"].value == 1.5
    assert found["Llama 1B: MFU of fit"].value == pytest.approx(3 * 1.5e14 / 989e12)
    assert found["Llama 1B: MFU of fit"].is_met
    assert found["Llama 1B: peak memory of fit, of torch.compile's"].value == 1.0
    assert found["BERT: fit over the scan"].value is None
    assert not found["BERT: fit over the scan"].is_met


def test_tables_and_plot(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text(json.dumps(_sample()), encoding="utf-8")
    main([str(path), "--output", str(tmp_path / "report")])
    text = (tmp_path / "report" / "tables.txt").read_text(encoding="utf-8")
    for part in ("10.000", "at most 0.2", "skipped: 3 s left", "33.4%", "3.21", "0.150"):
        assert part in text
    assert "BERT: fit over the scan" in text
    assert "ResNet-50" not in text  # none of its sides was run
    assert (tmp_path / "report" / "speeds.png").stat().st_size > 10_000
