"""Stalls in table and plot, against values by hand."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.checkpoint.report import (
    Figures,
    draw_stalls,
    make_restore_table,
    make_table,
    peer_ratios,
)

NOW = {"step": 0.1, "blocked": 5.0, "stall": 5.0, "behind": 0.0, "whole": 5.5}
BEHIND = {"step": 0.1, "blocked": 0.14, "stall": 0.15, "behind": 0.3, "whole": 6.0}
READ = {"restore": 0.5, "disk": 0.48, "share": 0.96}
FIGURES = Figures(
    "Stratagem",
    now={**NOW, **READ},
    behind={**BEHIND, **READ},
    first_now={**NOW, "save_peak": 1.02, "restore_peak": 1.5},
    first_behind={**BEHIND, "stall": 1.5, "save_peak": 2.03},
)


@pytest.mark.parametrize(("save_s", "bound_s"), [(5.0, 0.2), (10.0, 0.2), (20.0, 0.4)])
def test_bound_is_a_fifth_of_a_second_or_a_fiftieth_of_the_save(
    save_s: float, bound_s: float
) -> None:
    figures = dataclasses.replace(FIGURES, now={**NOW, "blocked": save_s})
    assert figures.bound_s == pytest.approx(bound_s)


def test_ratios_are_those_of_saves_stalls_and_restores() -> None:
    ours = dataclasses.replace(
        FIGURES, rounds_now=[{**NOW, **READ}], rounds_behind=[{**BEHIND, **READ}]
    )
    other = dataclasses.replace(
        ours,
        name="other",
        rounds_now=[{"blocked": 2.5, "restore": 1.0}],
        rounds_behind=[{"stall": 0.6}],
    )
    ratios = {row["case"]: row["ratio"] for row in peer_ratios([ours, other])}
    assert ratios == pytest.approx(
        {"save, waited for": 0.5, "stall of a save behind training": 4.0, "restore": 2.0}
    )


@pytest.mark.slow
def test_table_and_plot_show_every_side(tmp_path: Path) -> None:
    other = dataclasses.replace(FIGURES, name="other", behind={**BEHIND, "stall": 0.6})
    console = Console(width=150)
    with console.capture() as capture:
        console.print(make_table(10**9, [FIGURES, other]))
    lines = capture.get().splitlines()
    ours, theirs = (next(line for line in lines if name in line) for name in ("Stratagem", "other"))
    assert "1 GB" in lines[0]
    assert ours.split("│")[4].strip() == "0.150"
    assert theirs.split("│")[-2].strip() == "4.00"
    with console.capture() as capture:
        console.print(make_restore_table(10**9, [FIGURES, other]))
    row = next(line for line in capture.get().splitlines() if "Stratagem" in line)
    cells = [cell.strip() for cell in row.split("│")[2:-1]]
    assert cells == ["0.50", "0.48", "0.96", "1.02", "2.03", "1.50"]
    pytest.importorskip("matplotlib")
    draw_stalls(tmp_path / "made" / "plot.png", 10**9, [FIGURES, other], "somewhere")
    assert (tmp_path / "made" / "plot.png").stat().st_size > 10_000
