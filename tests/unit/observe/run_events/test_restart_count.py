"""Number of earlier starts, read from the environment."""

from __future__ import annotations

import pytest

from stratagem.observe.run_events.writer import restart_count


@pytest.mark.parametrize(("text", "count"), [(None, 0), ("", 0), ("0", 0), ("12", 12)])
def test_count(monkeypatch, text, count) -> None:
    monkeypatch.delenv("STRATAGEM_RESTART_COUNT", raising=False)
    if text is not None:
        monkeypatch.setenv("STRATAGEM_RESTART_COUNT", text)
    assert restart_count() == count


@pytest.mark.parametrize("text", ["often", "-1", "1.5"])
def test_count_that_is_none_is_refused(monkeypatch, text) -> None:
    monkeypatch.setenv("STRATAGEM_RESTART_COUNT", text)
    with pytest.raises(ValueError, match=f"STRATAGEM_RESTART_COUNT='{text}' is not a count"):
        restart_count()
