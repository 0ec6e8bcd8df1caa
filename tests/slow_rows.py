"""Rows of parametrized tests of which `make test` runs some, and `make test-slow` the others."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_but_for(quick: Collection[str], rows: Iterable[Any]) -> list[Any]:
    """All rows, of which those that are not named in `quick` are slow tests.

    A row is its own name, or has one.
    """
    named = {row if isinstance(row, str) else row.name: row for row in rows}
    return [
        pytest.param(row, id=name, marks=() if name in quick else pytest.mark.slow)
        for name, row in named.items()
    ]
