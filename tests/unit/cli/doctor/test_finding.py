"""A problem without a fix cannot be reported."""

from __future__ import annotations

import pytest

from stratagem.cli.doctor.settings import Finding, Level


@pytest.mark.parametrize("level", [Level.WARNING, Level.ERROR])
def test_problem_needs_a_fix(level: Level) -> None:
    with pytest.raises(AssertionError, match="the disk is full"):
        Finding("machine", level, "the disk is full")


@pytest.mark.parametrize("level", [Level.OK, Level.NOTE])
def test_harmless_finding_needs_no_fix(level: Level) -> None:
    assert Finding("machine", level, "2 cores").fix == ""
