"""Marks of rows of tests."""

from __future__ import annotations

from typing import Any

import pytest

__all__ = ["slow"]


def slow(*row: Any, **options: Any) -> Any:
    """Returns a row that `make test` leaves out."""
    return pytest.param(*row, marks=pytest.mark.slow, **options)
