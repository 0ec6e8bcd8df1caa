"""Errors of background work."""

from __future__ import annotations

import pytest

from stratagem.errors import raise_reported, report_error, take_reported


def test_each_is_raised_once_the_oldest_first() -> None:
    raise_reported()
    report_error(OSError("first"))
    report_error(ValueError("second"))
    with pytest.raises(OSError, match="first"):
        raise_reported()
    with pytest.raises(ValueError, match="second"):
        raise_reported()
    raise_reported()
    assert take_reported() == []


def test_errors_not_raised_are_taken() -> None:
    error = OSError("left")
    report_error(error)
    assert take_reported() == [error]
    raise_reported()
