"""Loader of the migration table, `symbols.toml`."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from stratagem.errors import invalid

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
        test: `file::function` of the test that covers the counterpart; "" if there is none.
    """

    name: str
    here: str
    status: str
    difference: str
    test: str


_FIELDS = tuple(field.name for field in dataclasses.fields(Symbol))


def load_symbols(path: Path | None = None) -> tuple[Symbol, ...]:
    """Loads the migration table.

    Args:
        path: TOML file with an array `symbol` of tables; None for the table of this library.

    Returns:
        The rows in the order of the file.

    Raises:
        ValueError: the file is not TOML, or a row is incomplete, inconsistent or repeated.
        OSError: the file cannot be read.

    Example:
        >>> from stratagem.cli.migrate.symbols import load_symbols
        >>> rows = {row.name: row for row in load_symbols()}
        >>> rows["tf.distribute.Strategy.unwrap"].here
        'sg.Strategy.local_results'

    Source: TF 2.21, public names; TF 1.15 contrib/distribute/__init__.py.
    """
    path = path or _TABLE
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise _invalid(path, f"is not TOML: {error}", "a TOML file.") from error
    if set(document) != {"symbol"} or not isinstance(document["symbol"], list):
        raise _invalid(path, f"has the keys {sorted(document)}.", "an array `symbol`.")
    rows = tuple(
        _symbol(path, number, row)
        for number, row in enumerate(cast("list[object]", document["symbol"]), start=1)
    )
    seen: set[str] = set()
    for row in rows:
        if row.name in seen:
            raise _invalid(path, f"has {row.name!r} twice.", "one row per name.")
        seen.add(row.name)
    return rows


def _symbol(path: Path, number: int, row: object) -> Symbol:
    if not isinstance(row, dict):
        raise _invalid(path, f"has {row!r} as row {number}.", "a table.")
    fields = cast("dict[str, object]", row)
    if set(fields) != set(_FIELDS):
        received = f"has the keys {sorted(fields)} in row {number}."
        raise _invalid(path, received, f"{', '.join(_FIELDS)}.")
    texts = {key: value for key, value in fields.items() if isinstance(value, str)}
    if len(texts) < len(fields):
        other = sorted(set(fields) - set(texts))
        raise _invalid(path, f"has {other} in row {number} that are not text.", "text.")
    symbol = Symbol(**texts)
    problem = _problem(symbol)
    if problem is not None:
        received, expected = problem
        raise _invalid(path, f"has {received} in row {number}, {symbol.name!r}.", expected)
    return symbol


def _problem(symbol: Symbol) -> tuple[str, str] | None:
    """Returns the first inconsistency of a row with the expected value; None for a valid row."""
    status = symbol.status
    because = f"because the status is {status!r}."
    has_counterpart = status in ("same", "renamed", "changed")
    counterpart = "a counterpart" if has_counterpart else "none"
    checks = (
        (not symbol.name, "no name", "the name of a symbol."),
        (status not in STATUSES, f"the status {status!r}", f"one of {', '.join(STATUSES)}."),
        (
            has_counterpart != bool(symbol.here),
            f"here = {symbol.here!r}",
            f"{counterpart}, {because}",
        ),
        (
            status == "same" and bool(symbol.difference),
            f"the difference {symbol.difference!r}",
            f"none, {because}",
        ),
        (
            status not in ("same", "renamed") and not symbol.difference,
            "no difference",
            f"a sentence, {because}",
        ),
        (has_counterpart and not symbol.test, "no test", f"the test of the counterpart, {because}"),
        (
            bool(symbol.test) and symbol.test.count("::") != 1,
            f"the test {symbol.test!r}",
            '"file::function".',
        ),
    )
    return next(((got, expected) for is_wrong, got, expected in checks if is_wrong), None)


def _invalid(path: Path, received: str, expected: str) -> ValueError:
    return invalid(f"{path} {received}", expected=expected, fix="correct the file.")
