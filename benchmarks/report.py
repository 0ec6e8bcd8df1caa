"""The results of a benchmark as rows, as a table and as a file."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.cases import Case
from benchmarks.runner import Measurement, paired_ratios

__all__ = [
    "Form",
    "Row",
    "make_row",
    "make_row_of_times",
    "make_rows",
    "make_table",
    "versions_by_environment",
    "write_json",
]

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Form:
    """What becomes of the measurements of a benchmark.

    Args:
        make_rows: of a case and its measurements, ours first.
        make_table: of the benchmark's name and all rows.
        draw: into a file, from the benchmark's name, all rows and a subtitle.
    """

    make_rows: Callable[[Case, Sequence[Measurement]], list[Row]]
    make_table: Callable[[str, Sequence[Row]], Table]
    draw: Callable[[Path, str, Sequence[Row], str], None]


def make_rows(case: Case, measurements: Sequence[Measurement]) -> list[Row]:
    """Returns a row for each reference; the ratio is above 1 where we are faster.

    The ratio is the median of those of the rounds: the sides of a round ran one after the other,
    under the same load.
    """
    ours, *references = measurements
    return [
        make_row(case.name, ours.steps_per_s, reference.steps_per_s, reference.side.name)
        for reference in references
    ]


def make_row(
    case_name: str,
    ours: Sequence[float],
    reference: Sequence[float],
    reference_name: str,
    metric: str = "steps/s",
) -> Row:
    """Returns a row from the figures of both in each round."""
    ratios = paired_ratios(ours, reference)
    return {
        "case": case_name,
        "metric": metric,
        "ours": statistics.median(ours),
        "reference": statistics.median(reference),
        "reference_name": reference_name,
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "ours_rounds": list(ours),
        "reference_rounds": list(reference),
    }


def make_row_of_times(
    case_name: str, ours_s: Sequence[float], reference_s: Sequence[float], reference_name: str
) -> Row:
    """Returns a row from the seconds of both in each round, as far as both went."""
    pairs = list(zip(ours_s, reference_s, strict=False))
    ours, reference = ([1 / pair[side] for pair in pairs] for side in (0, 1))
    return make_row(case_name, ours, reference, reference_name, "1/s")


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
