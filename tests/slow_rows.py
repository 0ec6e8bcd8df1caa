"""Tests and rows of parametrized tests that `make test` leaves out and `make test-slow` runs."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import pytest

_LIST = Path(__file__).with_name("nightly.txt").read_text(encoding="utf-8")
NIGHTLY = frozenset(line for line in _LIST.splitlines() if not line.startswith("#"))


def missing_nightly_rows(ids: Collection[str]) -> list[str]:
    """Rows of the files of these tests that name none of them, which would run in `make test`."""
    files = {name.partition("::")[0] for name in ids}
    return sorted(row for row in NIGHTLY - set(ids) if row.partition("::")[0] in files)


def slow_but_for(quick: Collection[str], rows: Iterable[Any]) -> list[Any]:
    """All rows, of which those that are not named in `quick` are slow tests.

    A row is its own name, or has one.
    """
    named = {row if isinstance(row, str) else row.name: row for row in rows}
    return [
        pytest.param(row, id=name, marks=() if name in quick else pytest.mark.slow)
        for name, row in named.items()
    ]
