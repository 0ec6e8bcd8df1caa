"""The results of a benchmark as rows, as a table and as a file."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.cases import Case
from benchmarks.runner import Measurement, paired_ratios

__all__ = ["make_rows", "make_table", "versions_by_environment", "write_json"]

Row = dict[str, Any]


def make_rows(case: Case, measurements: Sequence[Measurement]) -> list[Row]:
    """Returns a row for each reference; the ratio is above 1 where we are faster.

    The ratio is the median of those of the rounds: the sides of a round ran one after the other,
    under the same load.
    """
    ours, *references = measurements
    rows: list[Row] = []
    for reference in references:
        ratios = paired_ratios(ours.steps_per_s, reference.steps_per_s)
        rows.append(
            {
                "case": case.name,
                "metric": "steps/s",
                "ours": ours.median_steps_per_s,
                "reference": reference.median_steps_per_s,
                "reference_name": reference.side.name,
                "ratio": statistics.median(ratios),
                "ratio_min": min(ratios),
                "ratio_max": max(ratios),
                "ours_rounds": list(ours.steps_per_s),
                "reference_rounds": list(reference.steps_per_s),
            }
        )
    return rows


def versions_by_environment(measurements: Iterable[Measurement]) -> dict[str, dict[str, str]]:
    versions: dict[str, dict[str, str]] = {}
    for measurement in measurements:
        versions.setdefault(measurement.side.environment, {}).update(measurement.versions)
    return versions


def make_table(benchmark: str, rows: Sequence[Row]) -> Table:
    table = Table(title=f"{benchmark}: steps/s, medians of the rounds", title_justify="left")
    table.add_column("case")
    table.add_column("reference")
    for header in ("ours", "reference", "ratio", "min", "max"):
        table.add_column(header, justify="right", no_wrap=True)
    previous = None
    for row in rows:
        if previous not in (None, row["case"]):
            table.add_section()
        color = "green" if row["ratio"] >= 1 else "yellow"
        table.add_row(
            row["case"] if row["case"] != previous else "",
            row["reference_name"],
            f"{row['ours']:,.1f}",
            f"{row['reference']:,.1f}",
            f"[bold {color}]{row['ratio']:.3f}[/]",
            f"{row['ratio_min']:.3f}",
            f"{row['ratio_max']:.3f}",
        )
        previous = row["case"]
    return table


def write_json(path: Path, results: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
