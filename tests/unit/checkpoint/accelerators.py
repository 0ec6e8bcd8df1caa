"""Virtual CPU devices that stand in for accelerators with a memory of their own."""

from __future__ import annotations

from typing import Any

import pytest

from stratagem.checkpoint import device_copies
from stratagem.checkpoint import device_copies as device_room

__all__ = ["stand_in"]


def stand_in(
    monkeypatch: pytest.MonkeyPatch,
    *,
    limit_bytes: int = 2**40,
    stats: dict[str, int] | None = None,
) -> None:
    """Makes saves treat CPU devices as accelerators, with so much memory, or with these counts."""
    counts: Any = stats if stats is not None else {"bytes_limit": limit_bytes, "bytes_in_use": 0}
    monkeypatch.setattr(device_copies, "is_accelerator", lambda device: True)
    monkeypatch.setattr(device_room, "read_stats", lambda device: counts)
    monkeypatch.setattr(device_room, "_room", device_room.DeviceRoom())
    monkeypatch.setattr("stratagem.checkpoint.checkpoint.is_accelerator", lambda device: True)
