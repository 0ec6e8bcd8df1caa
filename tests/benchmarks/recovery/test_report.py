"""Kills in table and plot, against values by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.recovery.report import Recovery, draw_recoveries, make_table

OURS = Recovery("Stratagem", [(2.0, 0), (4.0, 1), (3.0, 0)])
OTHER = Recovery("other", [(6.0, 0), (12.0, 2), (9.0, 0), (30.0, 0)])


def test_table_and_plot_show_every_side(tmp_path: Path) -> None:
    console = Console(width=150)
    with console.capture() as capture:
        console.print(make_table(4, [OURS, OTHER]))
    lines = capture.get().splitlines()
    cells = {
        name: [cell.strip() for cell in line.split("│")[1:-1]]
        for name in ("Stratagem", "other")
        for line in lines
        if f"│ {name} " in line
    }
    assert "one of 4 workers" in lines[0]
    assert cells["Stratagem"] == ["Stratagem", "3", "3.0 s", "2.0 s", "4.0 s", "1 at most", "1.00"]
    assert cells["other"] == ["other", "4", "10.5 s", "6.0 s", "30.0 s", "2 at most", "3.50"]
    pytest.importorskip("matplotlib")
    draw_recoveries(tmp_path / "made" / "plot.png", 4, [OURS, OTHER], "somewhere")
    assert (tmp_path / "made" / "plot.png").stat().st_size > 10_000
