"""Settings of Ray for the tests of this folder."""

from __future__ import annotations

import pytest

_TOKEN = "0123456789abcdef" * 4


@pytest.fixture
def ray_settings(monkeypatch) -> None:
    for name in (
        "RAY_AUTH_MODE",
        "RAY_CLIENT_MODE",  # set by the import of Ray
        "RAY_COLOR_PREFIX",
        "RAY_DEDUP_LOGS",
        "RAY_FLUSH_DRIVER_LOGS",
        "RAY_SCHEDULER_EVENTS",
    ):
        monkeypatch.setenv(name, "")  # so that what is set meanwhile is gone at the end
        monkeypatch.delenv(name)
    monkeypatch.setenv("RAY_AUTH_TOKEN", _TOKEN)
