"""Backup workers: figures by hand, and on real processes."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.backup_workers import run_backup_workers
from benchmarks.backup_workers.run import make_table, training_of
from benchmarks.cases import Environments
from benchmarks.runner import Effort
from benchmarks.worker_process import WorkerError

WITHOUT = training_of(0, [0.0, 9.0, 10.0, 12.0], [4] * 12)
WITH = training_of(1, [0.0, 9.0, 10.0, 11.0], [4] * 8 + [4, 3, 3, 3])


def test_figures_are_those_of_the_parts() -> None:
    assert WITHOUT.steady_steps_per_s == 4.0
    assert (WITHOUT.steps_per_s, WITHOUT.rows_per_s) == (2.0, 2.0)
    assert (WITH.share_of_whole, WITH.rows_per_s) == (0.25, 3.25)


def test_a_training_that_ended_too_soon_is_an_error() -> None:
    with pytest.raises(WorkerError, match="ended in its part 2 of 3"):
        training_of(0, [0.0, 1.0], [4] * 7)


def test_table_has_the_ratios_to_none() -> None:
    console = Console(width=150)
    with console.capture() as capture:
        console.print(make_table([WITHOUT, WITH]))
    rows = [line for line in capture.get().splitlines() if line.startswith("│")]
    cells = [[cell.strip() for cell in row.split("│")[1:-1]] for row in rows]
    assert cells == [
        ["0", "2.0", "1.00", "2.0", "1.00", "100%", "4.0"],
        ["1", "4.0", "2.00", "3.2", "1.62", "25%", "4.0"],
    ]


@pytest.mark.slow
def test_benchmark_runs(tmp_path: Path) -> None:
    console = Console(file=io.StringIO())
    assert run_backup_workers(Environments(), Effort(), console, tmp_path, only="1", is_quick=True)
    results = json.loads((tmp_path / "backup_workers.json").read_text(encoding="utf-8"))
    (training,) = results["trainings"]
    assert training["num_backup_workers"] == 1
    assert 0.5 <= training["share_of_rows"] <= 1.0
