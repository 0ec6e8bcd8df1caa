"""Figures, table and picture, against values by hand."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.placement.cases import CASES
from benchmarks.placement.report import Figures, as_json, draw, make_table

TOLD = {
    "exchanged": {"step: all-reduce": 40_000_000, "step: all-gather": 20_000_000},
    "sent": {"cpu:0": 10_000_000, "cpu:1": 5_000_000, "cpu:2": 30_000_000},
    "fed": {"cpu:0": 1_000, "cpu:1": 1_000},
    "held": {
        "cpu:0": 100_000_000,
        "cpu:1": 120_000_000,
        "cpu:2": 50_000_000,
        "cpu:1 pinned_host": 7_000_000,
    },
    "peak": {},
    "steps": 10,
}
CASE = dataclasses.replace(CASES[0], sides=CASES[0].sides[:2])
FIRST, SECOND = (
    dataclasses.replace(Figures.of(CASE, side, TOLD, 0.0), steps_per_s=speeds)
    for side, speeds in zip(CASE.sides, [(2.0, 4.0, 8.0), (4.0, 4.0, 4.0)], strict=True)
)


def cells(figures: list[Figures]) -> list[list[str]]:
    console = Console(width=120)
    with console.capture() as capture:
        console.print(make_table(CASE, figures))
    return [
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in capture.get().splitlines()
        if "│" in line
    ]


def test_figures_are_of_a_step_and_of_the_fullest_device() -> None:
    assert (FIRST.held_bytes, FIRST.other_held_bytes, FIRST.peak_bytes) == (120e6, 50e6, None)
    assert FIRST.exchanged_bytes == {"step: all-reduce": 4e6, "step: all-gather": 2e6}
    assert FIRST.moved_bytes == {"in programs": 6e6, "to replicas": 1.5e6, "to the other": 3e6}
    assert FIRST.fed_bytes == 200
    assert FIRST.pinned_bytes == 7e6
    peaks = {**TOLD, "peak": {"cpu:1": 7, "cpu:2": 9}}
    assert Figures.of(CASE, CASE.sides[0], peaks, 0.0).peak_bytes == 7


def test_table_shows_every_side() -> None:
    moved = ["120.00", "50.00", "7.00", "6.00", "1.50", "3.00", "10.50"]
    assert cells([FIRST, SECOND]) == [
        ["Mirrored", "4.00", "1.00", "1.00", "1.00", *moved],
        ["shard_state=all", "4.00", "1.00", "0.50", "2.00", *moved],
    ]
    peak = dataclasses.replace(FIRST, held_bytes=40_000_000_000, peak_bytes=60_000_000_000)
    assert cells([peak])[0][5:] == ["40,000", *moved[1:6], "60,000"]


def test_rows_have_all_that_was_measured() -> None:
    first, second = as_json(CASE, [FIRST, SECOND])
    assert (first["case"], second["name"]) == (CASE.name, "shard_state=all")
    assert second["ratios"] == [2.0, 1.0, 0.5]
    assert second["options"]["placement"] == "state in parts"
    assert first["exchanged_bytes"]["step: all-gather"] == 2e6


@pytest.mark.slow
def test_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "made" / "plot.png"
    draw(path, {"one": [FIRST, SECOND], "two": [FIRST]}, "somewhere")
    assert path.stat().st_size > 10_000
