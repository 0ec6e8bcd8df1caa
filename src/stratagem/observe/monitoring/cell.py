"""Cells of a report: the content of a section for one run."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """Content of a section for one run: charts and a table, or the reason why it is empty."""

    charts: tuple[str, ...] = ()
    legend: tuple[tuple[str, str], ...] = ()  # role of the color, and text
    headers: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    note: str = ""
    empty: str = ""
