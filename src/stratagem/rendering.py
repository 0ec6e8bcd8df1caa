"""Lines and tables of an object, as text for a terminal and as HTML for a notebook."""

from __future__ import annotations

import copy
import html
import io
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

_WIDTH = 110
_BYTES_PER_GIB = 2**30
_BYTES_PER_MIB = 2**20


def size_text(num_bytes: float, *, least: float = 0.1) -> str:
    """Formats a size: "740 B", "12.5 MiB", "4.00 GiB".

    `least` is the smallest number of MiB or GiB that is not written in the next smaller unit.

    Example:
        >>> size_text(740), size_text(12.5 * 2**20)
        ('740 B', '12.5 MiB')
    """
    if num_bytes >= _BYTES_PER_GIB * least:
        return f"{num_bytes / _BYTES_PER_GIB:.2f} GiB"
    if num_bytes >= _BYTES_PER_MIB * least:
        return f"{num_bytes / _BYTES_PER_MIB:.1f} MiB"
    return f"{num_bytes / 1024:.1f} KiB" if num_bytes >= 1000 else f"{num_bytes:.0f} B"


def new_table(title: str | None, left: Sequence[str], right: Sequence[str] = ()) -> Table:
    """Returns an empty table with columns of text, then columns of numbers."""
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in left:
        table.add_column(name, overflow="fold")
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def as_text(parts: Sequence[str | Table], *, width: int = _WIDTH) -> str:
    """Returns lines and tables as plain text, without colors."""
    written = io.StringIO()
    console = Console(
        file=written,
        width=width,
        color_system=None,
        force_jupyter=False,
        markup=False,  # brackets are text
        emoji=False,
    )
    for part in parts:
        if isinstance(part, Table) and part.title:  # rich would wrap it to the table's width
            console.print(Text(str(part.title)))
            part = copy.copy(part)
            part.title = None
        console.print(Text(part) if isinstance(part, str) else part)
    lines = (line.rstrip() for line in written.getvalue().splitlines())
    return "\n".join(lines).strip("\n")


def as_html(parts: Sequence[str | Table]) -> str:
    """Returns lines and tables as HTML without scripts or colors of its own.

    The notebook's theme, light or dark, sets the colors.
    """
    written = "".join(
        f"<div>{html.escape(part)}</div>" if isinstance(part, str) else _table_html(part)
        for part in parts
        if part != ""  # an empty line of the text
    )
    return f'<div class="stratagem">{written}</div>'


def _table_html(table: Table) -> str:
    columns = table.columns
    aligned = [f' style="text-align:{column.justify}"' for column in columns]
    cells = [[_plain(cell) for cell in column.cells] for column in columns]
    heads = [_plain(column.header) for column in columns]
    head = "".join(f"<th{a}>{text}</th>" for a, text in zip(aligned, heads, strict=True))
    rows = [
        "".join(f"<td{a}>{text}</td>" for a, text in zip(aligned, row, strict=True))
        for row in zip(*cells, strict=True)
    ]
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    title = f"<div><b>{_plain(table.title)}</b></div>" if table.title else ""
    shown = f"<thead><tr>{head}</tr></thead>" if any(heads) else ""
    return f"{title}<table>{shown}<tbody>{body}</tbody></table>"


def _plain(cell: object) -> str:
    return html.escape(cell.plain if isinstance(cell, Text) else str(cell))
