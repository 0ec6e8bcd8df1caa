"""A count of the programs that select rows of arrays on devices."""

from __future__ import annotations

from typing import Any

import pytest

from stratagem.input import batches as device_rows

__all__ = ["count_selections"]


def count_selections(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Returns a list to which each call of such a program adds its static arguments."""
    made: list[Any] = []
    original = device_rows._program

    def counted(sharding: Any) -> Any:
        program = original(sharding)
        return lambda *args, **static: made.append(static) or program(*args, **static)

    monkeypatch.setattr(device_rows, "_program", counted)
    return made
