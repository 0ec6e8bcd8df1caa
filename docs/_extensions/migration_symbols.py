"""The page migrate/symbols: written before Sphinx reads the site, from the migration table."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from stratagem.cli.migrate.symbols import STATUSES, Symbol, load_symbols

if TYPE_CHECKING:
    from sphinx.application import Sphinx

_TABLE = Path(__file__).parents[2] / "src" / "stratagem" / "cli" / "migrate" / "symbols.toml"
_PAGE = "migrate/symbols.md"
_INTRODUCTION = """\
# Symbols of TensorFlow, Horovod, Accelerate and PyTorch

All public names of `tf.distribute` in TensorFlow 2.21 are listed, with their methods and
properties. The names around them in training programs follow. `sg` is `import stratagem as sg`.
Methods are listed once, with the class that defines them.

The symbols of `tf.estimator` and `tf.feature_column` are on
[the page about Estimators](../guides/estimator.md#from-tensorflow). The same table is read from
Python with `stratagem.cli.migrate.symbols.load_symbols()`.
"""


def page() -> str:
    """Returns the page: the meaning of each status, then a table for each heading."""
    symbols = load_symbols(_TABLE)
    headings = _headings(_TABLE.read_text(encoding="utf-8"))
    counts = Counter(symbol.status for symbol in symbols)
    parts = [_INTRODUCTION, "| status | for your program | symbols |\n|---|---|---|\n"]
    parts[-1] += "".join(
        f"| {status} | {meaning} | {counts[status]} |\n" for status, meaning in STATUSES.items()
    )
    by_heading: dict[str, list[Symbol]] = {}
    for symbol in symbols:
        by_heading.setdefault(headings[symbol.name], []).append(symbol)
    for heading, rows in by_heading.items():
        lines = [f"## {heading}", "", "| name | here | status | difference |"]
        lines += ["|---|---|---|---|", *map(_row, rows)]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _headings(table: str) -> dict[str, str]:
    """Returns the heading above each symbol of the table: the last comment line before it."""
    found: dict[str, str] = {}
    heading = ""
    for line in table.splitlines():
        line = line.strip()
        if line.startswith("# "):
            heading = line[2:]
        elif match := re.match(r'\{ name = "([^"]*)"', line):
            found[match[1]] = heading
    return found


def _row(symbol: Symbol) -> str:
    here = f"`{symbol.here}`" if symbol.here else "none"
    cells = (f"`{symbol.name}`", here, symbol.status, symbol.difference)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _write(app: Sphinx) -> None:
    path, text = Path(app.srcdir) / _PAGE, page()
    # A file that is written again is read again by Sphinx, whether it changed or not.
    if not path.exists() or path.read_text("utf-8") != text:
        path.write_text(text, "utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    """Writes the page at the start of a build."""
    app.connect("builder-inited", _write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
