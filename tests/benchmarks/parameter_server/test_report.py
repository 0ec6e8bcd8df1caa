"""Rows, table and speedups, against values by hand."""

from __future__ import annotations

import dataclasses

import pytest
from rich.console import Console

from benchmarks.parameter_server.cases import CASES, SCALING
from benchmarks.parameter_server.report import Figures, Speedup, make_rows, make_table, speedups_of

ROWS = next(case for case in CASES if case.kind == "pull_rows")
BOTH = Figures(ROWS, ours=[2e6, 4e6, 3e6], peer=[1e6, 1e6, 2e6])


def test_rows_have_a_ratio_where_both_sides_were_measured() -> None:
    alone = dataclasses.replace(BOTH, ours=[])
    compared, uncompared = make_rows([BOTH, alone])
    assert (compared["ours"], compared["reference"]) == (3e6, 1e6)
    assert [compared[name] for name in ("ratio", "ratio_min", "ratio_max")] == [2.0, 1.5, 4.0]
    assert (uncompared["ours"], uncompared["reference"]) == (None, 1e6)
    assert "ratio" not in uncompared
    assert make_rows([dataclasses.replace(BOTH, peer=[])])[0]["reference"] is None


def test_table_shows_every_row() -> None:
    alone = dataclasses.replace(BOTH, case=CASES[0], ours=[])
    console = Console(width=150)
    with console.capture() as capture:
        console.print(make_table(make_rows([BOTH, alone])))
    lines = [
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in capture.get().splitlines()
        if "│" in line
    ]
    assert lines == [
        ["pull 1,000 rows", "rows/s", "3,000,000", "1,000,000", "2.000", "1.500", "4.000"],
        ["MLP, a step a closure", "steps/s", "", "1,000,000", "", "", ""],
    ]


def test_speedups_are_of_the_sides_that_were_measured() -> None:
    small, large = (
        Figures(case, ours=ours, peer=peer)
        for case, ours, peer in zip(SCALING, ([], []), ([40.0, 50.0, 60.0], [180.0]), strict=True)
    )
    assert speedups_of(small, large) == [Speedup("TensorFlow", 4, pytest.approx(3.6))]
    both = [dataclasses.replace(small, ours=[10.0]), dataclasses.replace(large, ours=[39.0])]
    assert [one.factor for one in speedups_of(*both)] == pytest.approx([3.9, 3.6])
