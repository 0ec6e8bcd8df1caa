"""Fake head for the tests of one file, and settings of Ray."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.launch.remote.heads import TOKEN, Head, head


@pytest.fixture
def fake_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Head]:
    """A head that lets this process in."""
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    with head(tmp_path / "head") as made:
        (tmp_path / "head").mkdir()
        yield made


@pytest.fixture
def ray_settings(monkeypatch) -> None:
    for name in (
        "RAY_AUTH_MODE",
        "RAY_COLOR_PREFIX",
        "RAY_DEDUP_LOGS",
        "RAY_FLUSH_DRIVER_LOGS",
        "RAY_SCHEDULER_EVENTS",
    ):
        monkeypatch.setenv(name, "")  # so that what is set meanwhile is gone at the end
        monkeypatch.delenv(name)
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
