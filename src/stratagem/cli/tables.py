"""Plain tables in the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table


def show_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Prints a table; its cells are shown as they are."""
    table = Table(*columns)
    for row in rows:
        table.add_row(*row)
    Console(highlight=False, markup=False).print(table)
