"""The page about profiles explains each part of a step."""

from __future__ import annotations

from pathlib import Path

from stratagem.observe.profiling import PARTS

_PAGE = Path(__file__).parents[2] / "docs" / "how_to" / "profiling.md"


def test_each_part_is_explained() -> None:
    rows = [line.split("|")[1].strip() for line in _PAGE.read_text().splitlines() if "|" in line]
    assert [row for row in rows if row in PARTS] == list(PARTS)
