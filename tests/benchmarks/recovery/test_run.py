"""What kills have cost, by hand and on real processes."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.cases import Environments
from benchmarks.recovery import run_recovery
from benchmarks.recovery.run import Kill, kills_of
from benchmarks.runner import Effort
from benchmarks.worker_process import WorkerError
from benchmarks.workers.step_lines import StepLine, StepTeller, read_steps


def _steps(process_ids: tuple[int, int], *told: tuple[int, float]) -> list[StepLine]:
    """Of two processes, the second one a moment later."""
    return [
        StepLine(rank, process_id, step, time_s + 0.001 * rank)
        for step, time_s in told
        for rank, process_id in enumerate(process_ids)
    ]


def test_costs_of_kills() -> None:
    steps = [
        *_steps((10, 11), (1, 1.0), (2, 2.0), (3, 3.0)),
        StepLine(0, 10, 4, 3.6),  # what the other one still did
        *_steps((20, 21), (5, 8.0), (6, 9.0), (7, 10.0)),
        *_steps((30, 31), (6, 14.0)),
    ]
    kills = [Kill(3.5, 1, 11), Kill(10.5, 0, 20)]
    assert kills_of(kills, steps) == [(4.5, 0), (3.5, 2)]


@pytest.mark.parametrize("told", [[], [(1, 0.5)]])
def test_training_that_does_not_go_on_is_reported(told: list[tuple[int, float]]) -> None:
    with pytest.raises(WorkerError, match="No step was done after worker 1 was killed"):
        kills_of([Kill(1.0, 1, 11)], _steps((10, 11), *told))


def test_steps_are_read_as_they_were_reported(tmp_path: Path) -> None:
    for rank in (1, 0):
        teller = StepTeller(tmp_path, rank)
        for step in (1, 2):
            teller.tell(step)
    found = read_steps(tmp_path)
    assert [(one.rank, one.step) for one in found] == [(1, 1), (1, 2), (0, 1), (0, 2)]
    assert sorted(one.time_s for one in found) == [one.time_s for one in found]


@pytest.mark.slow
def test_killed_training_goes_on(tmp_path: Path) -> None:
    console = Console(width=150, record=True, file=io.StringIO())
    environments, effort = Environments(peers=Path("nowhere")), Effort(num_rounds=1)
    went_well = run_recovery(environments, effort, console, tmp_path, is_quick=True)
    written = json.loads((tmp_path / "recovery.json").read_text(encoding="utf-8"))
    assert went_well, written["failures"]
    assert [row["name"] for row in written["rows"]] == ["Stratagem", "Stratagem, cold"]
    assert all(lost <= 1 for row in written["rows"] for _, lost in row["costs"])
    assert len(written["long_run"]["failures"]) == 2
    assert written["long_run"]["is_over"]
    assert "Skipped: torchrun, DDP" in console.export_text()
    assert (tmp_path / "recovery_goodput.png").stat().st_size > 10_000
