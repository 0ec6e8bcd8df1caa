"""Table, picture and claims."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.slow_links.report import claims, draw_curves, make_table
from tests.benchmarks.slow_links.trainings import training

_LOCKSTEP = training("lockstep", (4.0, 3.0, 2.0), step_s=1.0, step_bytes=100e6)
_DILOCO = training("DiLoCo, H=50", (4.1, 3.1, 2.02), step_s=0.05, step_bytes=2e6)
_TOP_K = training("top-k", (4.1, 3.9, 3.8), step_s=0.5, step_bytes=3e6)


def test_a_row_for_each_method() -> None:
    text = io.StringIO()
    Console(file=text, width=200).print(make_table([_LOCKSTEP, _DILOCO, _TOP_K]))
    printed = text.getvalue()
    assert "a validation loss of 2.040" in printed
    rows = {line.split("│")[1].strip(): line for line in printed.splitlines() if "│" in line}
    assert "100.000" in rows["lockstep"]
    assert "+1.0%" in rows["DiLoCo, H=50"]
    assert rows["top-k"].count("never") == 4


def test_claims_that_hold() -> None:
    found = claims([_LOCKSTEP, _DILOCO, _TOP_K])
    assert [holds for _, holds in found] == [True, True, True]
    assert "1/50.0 of the bytes" in found[0][0]
    assert "19.9 times faster" in found[2][0]


def test_claims_that_do_not_hold() -> None:
    slow = training("DiLoCo, H=50", (4.1, 3.1, 2.03), step_s=0.2, step_bytes=5e6)
    assert [holds for _, holds in claims([_LOCKSTEP, slow])] == [False, True, False]
    poor = training("DiLoCo, H=50", (4.1, 3.1, 2.2), step_s=0.05, step_bytes=2e6)
    found = claims([_LOCKSTEP, poor])
    assert [holds for _, holds in found] == [True, False, False]
    assert "+10.0%" in found[1][0]
    assert "does not reach" in found[2][0]


def test_claims_of_each_outer_momentum() -> None:
    other = training("DiLoCo, H=50, momentum 0.5", (4.1, 3.1, 2.1), step_s=0.05, step_bytes=2e6)
    found = claims([_LOCKSTEP, _DILOCO, other])
    assert [holds for _, holds in found] == [True] * 4 + [False] * 2
    assert found[4][0] == "transformer, DiLoCo, H=50, momentum 0.5: its last loss is +5.0%"


def test_no_claims_without_lockstep() -> None:
    assert claims([_DILOCO]) == []


@pytest.mark.slow
def test_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw_curves(tmp_path / "curves.png", [_LOCKSTEP, _DILOCO, _TOP_K], "on two cores")
    assert (tmp_path / "curves.png").stat().st_size > 10_000
