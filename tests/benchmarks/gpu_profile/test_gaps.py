"""Gaps of a device: between operations that may overlap, sorted by length."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks.gpu_profile.gaps import by_length, gaps_between, main


def operation(name: str, begin_ns: float, end_ns: float) -> Any:
    return SimpleNamespace(name=name, begin_ns=begin_ns, end_ns=end_ns)


def test_operations_that_overlap_leave_no_gap() -> None:
    a, b, c = operation("a", 0, 100), operation("b", 20, 50), operation("c", 130, 140)
    assert gaps_between([c, a, b]) == [(100, 130, "a", "c")]
    assert gaps_between([a, b]) == gaps_between([]) == []


def test_gaps_are_counted_by_their_length() -> None:
    ends_ns = [10, 20_000, 199_999, 200_000, 5_000_000]
    found = by_length([(0.0, end, "a", "b") for end in ends_ns])
    assert found == {
        "short": {"count": 1, "sum_ns": 10},
        "middle": {"count": 2, "sum_ns": 219_999},
        "long": {"count": 2, "sum_ns": 5_200_000},
    }


@pytest.mark.slow
@pytest.mark.parametrize("side", ["fit", "scan"])
def test_two_epochs_are_profiled(side: str, tmp_path: Path) -> None:
    output = tmp_path / "gaps.json"
    result = CliRunner().invoke(main, [side, "mlp", "--tiny", "--output", str(output)])
    assert result.exit_code == 0, result.output
    facts = json.loads(output.read_text())
    assert facts["num_operations"] > 0
    gaps_ns = sum(one["sum_ns"] for one in facts["gaps"].values())
    assert 0 < gaps_ns < facts["span_ns"]
    lengths = [one["length_ns"] for one in facts["longest"]]
    assert lengths == sorted(lengths, reverse=True)
