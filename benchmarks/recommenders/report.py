"""Speeds, processor time, bytes and memory of tables as rows and as a table."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from benchmarks.report import make_row

__all__ = ["Figures", "make_rows", "make_table", "median_of"]

_KINDS = {"pull": "pull", "step": "pull and push"}


@dataclasses.dataclass(frozen=True)
class Figures:
    """One kind of call on one table, by both sides.

    Args:
        title: of the table.
        peer: name of the other side.
        kind: "pull" or "step".
        num_ids: ids of a call.
        per_s: ids a second of each side in each round, ours first.
        cpu_s: processor time of a call of each side, in seconds.
        sent_bytes: bytes that each side sent in a call.
        row_bytes: memory of each side for a row of the table.
    """

    title: str
    peer: str
    kind: str
    num_ids: int
    per_s: tuple[Sequence[float], Sequence[float]]
    cpu_s: tuple[float, float]
    sent_bytes: tuple[float, float]
    row_bytes: tuple[float, float]


def make_rows(figures: Sequence[Figures]) -> list[dict[str, Any]]:
    """Returns a row for each kind of call; a ratio above 1 means that ours is better."""
    rows: list[dict[str, Any]] = []
    for one in figures:
        case = f"{one.title}: {_KINDS[one.kind]}, {one.num_ids:,} ids"
        row = make_row(case, *one.per_s, one.peer, "ids/s")
        for name, (ours, peer) in {
            "cpu_us_per_id": tuple(seconds * 1e6 / one.num_ids for seconds in one.cpu_s),
            "sent_bytes_per_id": tuple(sent / one.num_ids for sent in one.sent_bytes),
            "row_bytes": one.row_bytes,
        }.items():
            row |= {name: ours, f"reference_{name}": peer}
        rows.append(row)
    return rows


def make_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Returns a table of the rows; of two figures in a cell, ours is the first."""
    table = Table(title="recommenders: medians of the rounds, ours first", title_justify="left")
    table.add_column("case")
    table.add_column("beside")
    for header in ("k ids/s", "ratio", "min", "max", "CPU us/id", "bytes/id", "bytes/row"):
        table.add_column(header, justify="right", no_wrap=True)
    for row in rows:
        color = "green" if row["ratio"] >= 1 else "yellow"
        table.add_row(
            row["case"],
            row["reference_name"],
            f"{row['ours'] / 1e3:,.0f}, {row['reference'] / 1e3:,.0f}",
            f"[bold {color}]{row['ratio']:.2f}[/]",
            f"{row['ratio_min']:.2f}",
            f"{row['ratio_max']:.2f}",
            *(
                f"{row[name]:,.{digits}f}, {row[f'reference_{name}']:,.{digits}f}"
                for name, digits in (
                    ("cpu_us_per_id", 2),
                    ("sent_bytes_per_id", 0),
                    ("row_bytes", 0),
                )
            ),
        )
    return table


def median_of(told: Sequence[dict[str, float]], name: str, amount: int) -> float:
    """Returns the median of a figure of a call over rounds of so many calls."""
    return statistics.median(one[name] / amount for one in told)
