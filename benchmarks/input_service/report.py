"""Shares of busy time as rows and as a table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from benchmarks.input_service.cases import Starved
from benchmarks.report import make_row

__all__ = ["make_rows", "make_table"]

_OURS = "Stratagem"


def make_rows(
    figures: Mapping[tuple[Starved, int, str], Sequence[Mapping[str, float]]],
) -> list[dict[str, Any]]:
    """Returns a row for each peer; a ratio above 1 means that our device is busier.

    A round that a side failed in is left out from the end.
    """
    rows: list[dict[str, Any]] = []
    for (work, num_workers, side), theirs in figures.items():
        ours = figures.get((work, num_workers, _OURS))
        if side == _OURS or not ours:
            continue
        pairs = list(zip(ours, theirs, strict=False))
        shares = ([pair[place]["busy"] for pair in pairs] for place in (0, 1))
        row = make_row(f"{work.title}, {num_workers} workers", *shares, side, "busy")
        row |= {"title": work.title, "num_workers": num_workers, "step_s": work.step_s}
        for name, told in (("cpu_ms", ours), ("reference_cpu_ms", theirs)):
            row[name] = 1e3 * statistics.median(one["cpu_s"] for one in told)
        rows.append(row)
    return rows


def make_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Returns a table of the rows; of two figures in a cell, ours is the first."""
    table = Table(
        title="input_service: share of time that the device is busy, medians, ours first",
        title_justify="left",
    )
    table.add_column("work")
    table.add_column("beside")
    for header in ("busy", "ratio", "min", "max", "CPU ms a batch"):
        table.add_column(header, justify="right", no_wrap=True)
    for row in rows:
        color = "green" if row["ratio"] >= 1 else "yellow"
        table.add_row(
            row["case"],
            row["reference_name"],
            f"{row['ours']:.0%}, {row['reference']:.0%}",
            f"[bold {color}]{row['ratio']:.2f}[/]",
            f"{row['ratio_min']:.2f}",
            f"{row['ratio_max']:.2f}",
            f"{row['cpu_ms']:.1f}, {row['reference_cpu_ms']:.1f}",
        )
    return table
