"""Tables of a survey: connections, round trips, bandwidth and clocks of all pairs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.table import Table

from stratagem.cli.doctor.network.survey import Survey

# Wider tables do not fit a terminal; JSON and the picture have all.
MAX_COLUMNS = 12


def survey_tables(survey: Survey) -> Iterator[Table]:
    """Yields the tables that show more than that every host reaches every other."""
    if len(survey.hosts) <= MAX_COLUMNS:
        for title, matrix, text in (
            ("Port of the cluster", survey.cluster, _attempt),
            ("Free port", survey.free, _attempt),
            ("Round trip, ms", survey.round_trip_s, lambda trip_s: f"{1e3 * trip_s:.2f}"),
            ("Bandwidth, MB/s", survey.bytes_per_s, lambda rate: f"{rate / 1e6:.0f}"),
        ):
            values = [value for row in matrix for value in row if value is not None]
            if any(value != "reached" for value in map(_outcome, values)):
                yield _matrix_table(title, survey.names, matrix, text)
    if sum(offset_s is not None for offset_s in survey.offset_s) > 1:
        yield _clock_table(survey)


def _matrix_table(
    title: str,
    names: Sequence[str],
    matrix: Sequence[Sequence[Any]],
    text: Callable[[Any], str],
) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("from \\ to")
    for name in names:
        table.add_column(name, justify="right")
    for one, row in enumerate(matrix):
        cells = [
            "" if one == other else "-" if value is None else text(value)
            for other, value in enumerate(row)
        ]
        table.add_row(names[one], *cells)
    return table


def _clock_table(survey: Survey) -> Table:
    table = Table("host", title="Clocks", title_justify="left")
    table.add_column(f"ahead of {survey.names[survey.reference]}, ms", justify="right")
    table.add_column("±, ms", justify="right")
    rows = zip(survey.names, survey.offset_s, survey.uncertainty_s, strict=True)
    for name, offset_s, uncertainty_s in rows:
        if name == survey.names[survey.reference]:
            continue
        cells = ("-" if s is None else f"{1e3 * s:.2f}" for s in (offset_s, uncertainty_s))
        table.add_row(name, *cells)
    return table


def _outcome(value: Any) -> object:
    return value[0] if isinstance(value, tuple) else value


def _attempt(tried: tuple[str, str]) -> str:
    color = "green" if tried[0] == "reached" else "red"
    return f"[{color}]{tried[0]}[/{color}]"
