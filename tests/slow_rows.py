"""Tests and rows of parametrized tests that `make test` leaves out and `make test-slow` runs."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest


def _read(name: str) -> frozenset[str]:
    lines = Path(__file__).with_name(name).read_text(encoding="utf-8").splitlines()
    return frozenset(line for line in lines if not line.startswith("#"))


NIGHTLY = _read("nightly.txt")
QUICK_ROWS = _read("quick_rows.txt")


def _function(test: str) -> str:
    return test.partition("[")[0]


_CHOSEN_BY_HAND = frozenset(map(_function, QUICK_ROWS))


def is_nightly(test: str) -> bool:
    """True for a test, or a row of one, that only `make test-slow` runs; takes its id."""
    if test in NIGHTLY or _function(test) in NIGHTLY:
        return True
    return _function(test) in _CHOSEN_BY_HAND and test not in QUICK_ROWS


def missing_rows(ids: Collection[str]) -> list[str]:
    """Lines of both lists about the files of these tests that name none of them."""
    files = {name.partition("::")[0] for name in ids}
    unknown = (NIGHTLY | QUICK_ROWS) - set(ids) - set(map(_function, ids))
    return sorted(row for row in unknown if row.partition("::")[0] in files)


def slow_but_for(quick: Collection[str], rows: Iterable[Any]) -> list[Any]:
    """All rows, of which those that are not named in `quick` are slow tests.

    A row is its own name, or has one.
    """
    named = {row if isinstance(row, str) else row.name: row for row in rows}
    return [
        pytest.param(row, id=name, marks=() if name in quick else pytest.mark.slow)
        for name, row in named.items()
    ]


# Fewer rows cost little, and their combinations are easily read.
_MOST_ROWS = 4
_NOT_CHOSEN_FROM = ("slow", "every_combination")


def covering_rows(name: str, rows: Sequence[Sequence[str]]) -> list[int]:
    """Indices of few rows that together have each value of each column.

    Each row adds as many new values as any. The name tells where the search begins: functions with
    the same columns run different combinations, and each function always the same ones.
    """
    values = [set(enumerate(row)) for row in rows]
    start = zlib.crc32(name.encode()) % len(rows)
    order = [*range(start, len(rows)), *range(start)]
    missing = set[tuple[int, str]]().union(*values)
    chosen: list[int] = []
    while missing:
        best = max(order, key=lambda index: len(values[index] & missing))
        chosen.append(best)
        missing -= values[best]
    return sorted(chosen)


def spare_combinations(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Quick rows whose values of each `parametrize` and fixture all occur in other quick rows.

    Those of a function with at most four such rows, or marked `every_combination`, are not spare.
    Rows that run op by op are chosen by themselves: runs of other versions leave them out.
    """
    functions: dict[tuple[str, bool], list[tuple[pytest.Item, Sequence[str]]]] = {}
    for item in items:
        if hasattr(item, "callspec") and not any(map(item.get_closest_marker, _NOT_CHOSEN_FROM)):
            # An id for each `parametrize` and each fixture with parameters.
            ids = item.callspec._idlist
            key = (item.nodeid.partition("[")[0], "eager" in ids)
            functions.setdefault(key, []).append((item, ids))
    spare: list[pytest.Item] = []
    for (name, _), rows in functions.items():
        if len(rows) > _MOST_ROWS:
            chosen = covering_rows(name, [ids for _, ids in rows])
            spare += [item for index, (item, _) in enumerate(rows) if index not in chosen]
    return spare
