"""The table of outcomes, and the whole error below it."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from stratagem.cli.selftest import report
from stratagem.cli.selftest.cases import CASES, Case, CaseOutcome


def test_table_shows_each_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = iter(
        [
            CaseOutcome(CASES[0], 1e-8, 1, 2.0),
            CaseOutcome(CASES[1], problem="ValueError: " + 30 * "long "),
            CaseOutcome(CASES[2], problem="zmq is not installed", is_skipped=True),
        ]
    )

    def run_case(case: Case) -> CaseOutcome:
        del case
        return next(outcomes)

    monkeypatch.setattr(report, "run_case", run_case)
    console = Console(file=io.StringIO(), width=300)
    assert len(report.run_shown(CASES[:3], console)) == 3
    text = console.file.getvalue()
    assert "1.0e-08" in text
    assert "skipped: zmq is not installed" in text
    assert "OneDeviceStrategy: ValueError: long long" in text
