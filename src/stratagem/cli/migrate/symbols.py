"""Loader of the migration table, `symbols.toml`."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from pathlib import Path

# Each status, and its meaning for a program that uses the symbol.
STATUSES: Mapping[str, str] = {
    "same": "only the prefix changes",
    "renamed": "another name with the same arguments and meaning",
    "changed": "other arguments or another meaning",
    "unneeded": "remove the call",
    "absent": "no counterpart",
}
_TABLE = Path(__file__).with_name("symbols.toml")


@dataclasses.dataclass(frozen=True)
class Symbol:
    """One row of the migration table.

    Args:
        name: dotted name in the other library, or a command.
        here: dotted name of the counterpart, or a command; "" if there is none.
        status: a key of `STATUSES`.
        difference: one or two sentences; "" for status "same".
    """

    name: str
    here: str
    status: str
    difference: str


def load_symbols(path: Path = _TABLE) -> tuple[Symbol, ...]:
    """Loads the migration table.

    Args:
        path: TOML file with an array `symbol` of tables; by default the table of this library.

    Returns:
        The rows in the order of the file.

    Example:
        >>> from stratagem.cli.migrate.symbols import load_symbols
        >>> rows = {row.name: row for row in load_symbols()}
        >>> rows["tf.distribute.Strategy.unwrap"].here
        'sg.Strategy.local_results'

    Source: TF 2.21, public names; TF 1.15 contrib/distribute/__init__.py.
    """
    return tuple(Symbol(**row) for row in tomllib.loads(path.read_text("utf-8"))["symbol"])
