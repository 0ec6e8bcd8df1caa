"""The benchmark on real processes, with small arrays."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from benchmarks.cases import Environments
from benchmarks.runner import Effort
from benchmarks.transport import run_transport
from benchmarks.transport.run import DIRECTIONS, SIZES_BYTES, calls_of_round
from benchmarks.workers.call_times import answer_calls, values_of


@pytest.mark.slow
@pytest.mark.parametrize("side", ["", "Stratagem"])
def test_sides_call_and_tell(tmp_path: Path, side: str) -> None:
    console = Console(width=150, record=True, file=io.StringIO())
    went_well = run_transport(
        Environments(), Effort(num_rounds=1), console, tmp_path, only=side, is_quick=True
    )
    written = json.loads((tmp_path / "transport.json").read_text(encoding="utf-8"))
    assert went_well, written["failures"]
    wanted = [(way, size) for way in DIRECTIONS for size in SIZES_BYTES[:2]]
    assert [(row["direction"], row["size_bytes"]) for row in written["rows"]] == wanted
    for row in written["rows"]:
        assert set(row["seconds"]) == (
            {side} if side else {"Stratagem", "not encrypted", "Ray actor"}
        )
        assert all(len(seconds) == 100 for seconds in row["seconds"].values())


def test_nothing_is_measured_of_no_side(tmp_path: Path) -> None:
    console = Console(width=150, record=True, file=io.StringIO())
    assert run_transport(Environments(), Effort(), console, tmp_path, only="nobody")
    assert "No side of transport is called 'nobody'" in console.export_text()


def test_sizes_are_those_that_were_asked_for() -> None:
    assert (SIZES_BYTES[0], SIZES_BYTES[-1]) == (10**3, 10**8)
    assert [calls_of_round(size) for size in SIZES_BYTES] == [100, 100, 100, 100, 10, 2]


def test_each_call_is_timed_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    costs_s = iter([0.5, 0.25, 2.0])

    def pull(size: int) -> np.ndarray:
        nonlocal now_s
        now_s += next(costs_s)
        return values_of(size)

    def push(values: np.ndarray) -> float:
        return float(pull(len(values))[-1])

    monkeypatch.setattr("time.perf_counter", lambda: now_s)
    answer = answer_calls(pull, push)
    assert answer({"direction": "pull", "bytes": 40, "calls": 2}) == {"seconds": [0.5, 0.25]}
    assert answer({"direction": "push", "bytes": 40, "calls": 1}) == {"seconds": [2.0]}


def test_side_that_sends_something_else_is_refused() -> None:
    answer = answer_calls(lambda size: values_of(size - 1), lambda values: 3.0)
    for direction, came in (("pull", "9.0"), ("push", "3.0")):
        with pytest.raises(RuntimeError, match=f"{came} came as the last number, and it is 10.0"):
            answer({"direction": direction, "bytes": 40, "calls": 1})
