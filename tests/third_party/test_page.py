"""The page about these libraries prints what it shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.test_pages import differences

_PAGE = Path(__file__).parents[2] / "docs" / "how_to" / "third_party.md"


def test_page_prints_what_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a tuner writes into the current folder
    assert not differences(_PAGE.read_text(encoding="utf-8"), _PAGE.name)
