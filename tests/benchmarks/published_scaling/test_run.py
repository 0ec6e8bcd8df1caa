"""The benchmark as a whole, with answers in place of compilations."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks.cases import Environments
from benchmarks.published_scaling import run, run_published_scaling
from benchmarks.runner import Effort
from benchmarks.worker_process import WorkerError


def _answer(program: str, accelerator: str, batch: int, *_: object) -> dict[str, Any]:
    del program, accelerator
    return {
        "batch": batch,
        "compute_s": 1e-3 * batch,
        "launch_s": 1e-3,
        "compiler": "gpu",
        "reductions": [{"name": "sum", "num_bytes": 10**8, "kind": "all-reduce", "times": 1}],
    }


def _failing(program: str, accelerator: str, batch: int, *_: object) -> dict[str, Any]:
    if program == "resnet50" and accelerator == "H100":
        raise WorkerError("out of memory")
    return _answer(program, accelerator, batch)


def _run(folder: Path, **options: Any) -> tuple[bool, dict[str, Any], str]:
    text = io.StringIO()
    console = Console(file=text, width=160)
    went_well = run_published_scaling(Environments(), Effort(), console, folder, **options)
    return went_well, json.loads((folder / "published_scaling.json").read_text()), text.getvalue()


@pytest.mark.slow
def test_results_table_and_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(run, "_compile", _answer)
    went_well, results, printed = _run(tmp_path)
    assert went_well
    assert not results["failures"]
    assert {row["model"] for row in results["rows"]} == {"ResNet-50", "BERT-large", "7B"}
    assert "programs compiled for gpu" in printed
    assert (tmp_path / "published_scaling.png").stat().st_size > 10_000


def test_failed_programs_are_told_and_others_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(run, "_compile", _failing)
    went_well, results, printed = _run(tmp_path, only="ResNet-50")
    assert not went_well
    assert results["failures"] == [{"case": "resnet50 on H100", "error": "out of memory"}]
    assert {row["group"] for row in results["rows"]} >= {"MLPerf 2.0, MXNet"}
    assert not any(row["group"] == "MLPerf 3.0, MXNet" for row in results["rows"])
    assert "Failed: resnet50 on H100" in printed
