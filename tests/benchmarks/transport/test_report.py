"""Times of calls in table and plot, against values by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.transport.report import Figures, draw_times, make_table, size_name

RESULTS = [
    Figures("pull", 10**3, {"ours": [0.003, 0.001, 0.002], "other": [0.008, 0.006, 0.004]}),
    Figures("pull", 10**8, {"ours": [0.2, 0.1], "other": [0.02, 0.01]}),
    Figures("push", 10**3, {"ours": [0.001], "other": [0.001]}),
]


def test_speed_is_the_ratio_of_the_medians() -> None:
    assert RESULTS[0].best_s("other") == 0.004
    assert RESULTS[0].median_s("other") == 0.006
    assert [one.speed_over("other") for one in RESULTS] == pytest.approx([3.0, 0.1, 1.0])


@pytest.mark.slow
def test_table_and_plot_show_every_size(tmp_path: Path) -> None:
    console = Console(width=150)
    with console.capture() as capture:
        console.print(make_table(RESULTS))
    lines = [
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in capture.get().splitlines()
        if "B " in line and "│" in line
    ]
    assert lines == [
        ["pull", "1 KB", "1.000 2.000", "4.000 6.000", "3.00"],
        ["", "100 MB", "100.000 150.000", "10.000 15.000", "0.10"],
        ["push", "1 KB", "1.000 1.000", "1.000 1.000", "1.00"],
    ]
    pytest.importorskip("matplotlib")
    draw_times(tmp_path / "made" / "plot.png", RESULTS, "somewhere")
    assert (tmp_path / "made" / "plot.png").stat().st_size > 10_000


@pytest.mark.parametrize(("size", "name"), [(10**3, "1 KB"), (10**5, "100 KB"), (10**6, "1 MB")])
def test_size_name(size: int, name: str) -> None:
    assert size_name(size) == name
