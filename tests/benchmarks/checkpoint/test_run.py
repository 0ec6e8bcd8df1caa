"""The benchmark on real processes, with a small state."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks.cases import Environments
from benchmarks.checkpoint import run_checkpoint
from benchmarks.runner import Effort
from benchmarks.workers.checkpoint_rounds import State, answer_rounds


@pytest.mark.slow
def test_sides_save_and_tell(tmp_path: Path) -> None:
    console = Console(width=150, record=True, file=io.StringIO())
    environments, effort = Environments(peers=Path("nowhere")), Effort(num_rounds=1)
    went_well = run_checkpoint(environments, effort, console, tmp_path, is_quick=True)
    written = json.loads((tmp_path / "checkpoint.json").read_text(encoding="utf-8"))
    assert went_well, written["failures"]
    assert [row["name"] for row in written["rows"]] == ["Stratagem", "Orbax by hand"]
    assert all(row["now"]["blocked"] > 0 and row["behind"]["whole"] > 0 for row in written["rows"])
    assert all(row["now"]["share"] > 0 for row in written["rows"])
    assert all(row["first_now"]["save_peak"] > 0 for row in written["rows"])
    assert "Skipped: PyTorch DCP" in console.export_text()


def test_stall_is_the_call_and_what_the_next_step_takes_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0
    steps_s = iter([1.0] * 5 + [1.5, 1.1, 1.1, 1.0, 1.0])

    def advance(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    def save(folder: str, is_async: bool) -> Any:
        assert is_async
        Path(folder).mkdir()
        (Path(folder) / "array").write_bytes(bytes(3000))
        advance(0.25)
        return lambda: advance(2.0)

    monkeypatch.setattr("time.perf_counter", lambda: now_s)

    def read(folder: str) -> None:
        advance(0.5)

    monkeypatch.setattr("benchmarks.workers.checkpoint_rounds._read_all", read)
    state = State(
        size_bytes=4000,
        base_bytes=0,
        step=lambda: advance(next(steps_s)),
        save=save,
        restore=lambda folder: advance(2.0),
        first_value=lambda: 1.0,
    )
    told = answer_rounds(state)({"folder": str(tmp_path / "saved"), "is_async": True})
    monkeypatch.undo()
    assert told == pytest.approx(
        {
            "step": 1.0,
            "blocked": 0.25,
            "stall": 0.75,
            "behind": 0.2,
            "whole": 7.95,
            "restore": 2.0,
            "disk": 0.5,
            "share": (4000 / 2) / (3000 / 0.5),
        }
    )
    assert not (tmp_path / "saved").exists()


def test_restore_of_other_values_is_an_error(tmp_path: Path) -> None:
    values = iter([1.0, 2.0, 2.0])

    def save(folder: str, is_async: bool) -> Any:
        Path(folder).mkdir()
        (Path(folder) / "array").write_bytes(b"1")
        return lambda: None

    state = State(1, 0, lambda: None, save, lambda folder: None, lambda: next(values))
    with pytest.raises(ValueError, match=r"Restored 2\.0, saved was 1\.0"):
        answer_rounds(state)({"folder": str(tmp_path / "saved"), "is_async": False})
