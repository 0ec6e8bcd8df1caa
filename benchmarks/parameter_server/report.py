"""Speeds of parameter servers as rows, as a table, and how they grow with workers."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from benchmarks.parameter_server.cases import PEER, Case
from benchmarks.report import make_row

__all__ = ["Figures", "Speedup", "make_rows", "make_table", "speedups_of"]


@dataclasses.dataclass(frozen=True)
class Figures:
    """What was measured of a case: so much a second, in each round.

    Args:
        case: which.
        ours: empty where nothing of ours does such work, or was asked to.
        peer: empty where the peer is not installed.
    """

    case: Case
    ours: Sequence[float]
    peer: Sequence[float]

    @property
    def is_compared(self) -> bool:
        """Whether both sides were measured."""
        return bool(self.ours and self.peer)


@dataclasses.dataclass(frozen=True)
class Speedup:
    """How much faster closures that sleep are with more workers.

    Args:
        side: its name.
        num_workers: of the larger cluster; the smaller one has 1.
        factor: the speed of the larger over that of the smaller.
    """

    side: str
    num_workers: int
    factor: float


def make_rows(results: Sequence[Figures]) -> list[dict[str, Any]]:
    """Returns a row for each case; without a ratio where one side alone was measured."""
    rows: list[dict[str, Any]] = []
    for one in results:
        if one.is_compared:
            rows.append(make_row(one.case.name, one.ours, one.peer, PEER.name, one.case.unit))
        else:
            rows.append(
                {
                    "case": one.case.name,
                    "metric": one.case.unit,
                    "ours": statistics.median(one.ours) if one.ours else None,
                    "reference": statistics.median(one.peer) if one.peer else None,
                    "reference_name": PEER.name,
                    "ours_rounds": list(one.ours),
                    "reference_rounds": list(one.peer),
                }
            )
    return rows


def make_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Returns a table of the rows."""
    title = "parameter_server: so much a second, medians of the rounds"
    table = Table(title=title, title_justify="left")
    table.add_column("case")
    for header in ("unit", "ours", PEER.name, "ratio", "min", "max"):
        table.add_column(header, justify="right", no_wrap=True)
    for row in rows:
        cells = ["", "", ""]
        if "ratio" in row:
            color = "green" if row["ratio"] >= 1 else "yellow"
            cells = [f"[bold {color}]{row['ratio']:.3f}[/]"]
            cells += [f"{row['ratio_min']:.3f}", f"{row['ratio_max']:.3f}"]
        speeds = ["" if row[side] is None else f"{row[side]:,.0f}" for side in _SIDES]
        table.add_row(row["case"], row["metric"], *speeds, *cells)
    return table


_SIDES = ("ours", "reference")


def speedups_of(small: Figures, large: Figures) -> list[Speedup]:
    """Says what more workers are worth.

    Args:
        small: of one worker.
        large: of several.

    Returns:
        One for each side that was measured on both.
    """
    sides = {"Stratagem": (small.ours, large.ours), PEER.name: (small.peer, large.peer)}
    return [
        Speedup(
            name,
            large.case.cluster.num_workers,
            statistics.median(many) / statistics.median(one),
        )
        for name, (one, many) in sides.items()
        if one and many
    ]
