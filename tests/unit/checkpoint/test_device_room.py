"""Memory of a device that copies may take, from its statistics."""

from __future__ import annotations

from typing import Any

import jax
import pytest

from stratagem.checkpoint import device_copies as device_room
from stratagem.checkpoint.device_copies import DeviceRoom, read_stats

DEVICE: Any = "a device"


@pytest.fixture
def stats(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    counts: dict[str, int] = {}
    monkeypatch.setattr(device_room, "read_stats", lambda device: counts)
    return counts


def test_memory_of_the_largest_step_and_a_reserve_stay_free(stats: dict[str, int]) -> None:
    stats.update(bytes_limit=1600, bytes_in_use=200, peak_bytes_in_use=500)
    assert DeviceRoom().left_bytes(DEVICE, 0) == 1600 - 500 - 100
    stats["bytes_in_use"] = 700
    assert DeviceRoom().left_bytes(DEVICE, 0) == 1600 - 700 - 100
    stats["bytes_in_use"] = 1600
    assert DeviceRoom().left_bytes(DEVICE, 0) == 0


def test_own_copies_in_the_peak_do_not_count(stats: dict[str, int]) -> None:
    room = DeviceRoom()
    stats.update(bytes_limit=1600, bytes_in_use=200, peak_bytes_in_use=500)
    room.take(DEVICE, 300)
    stats["peak_bytes_in_use"] = 800  # steps beside the copies
    assert room.left_bytes(DEVICE, 0) == 1600 - 500 - 100
    room.take(DEVICE, 300)
    stats["peak_bytes_in_use"] = 1200  # steps that need more
    assert room.left_bytes(DEVICE, 0) == 1600 - 900 - 100


@pytest.mark.parametrize("known", [{}, {"bytes_in_use": 1}, {"bytes_limit": 1}])
def test_unknown_memory_is_none(stats: dict[str, int], known: dict[str, int]) -> None:
    stats.update(known)
    assert DeviceRoom().left_bytes(DEVICE, 0) == 0


def test_piece_must_fit_into_a_free_block_or_into_new_memory(stats: dict[str, int]) -> None:
    stats.update(bytes_limit=1600, bytes_in_use=200, pool_bytes=1600, largest_free_block_bytes=50)
    assert DeviceRoom().left_bytes(DEVICE, 50) > 0
    assert DeviceRoom().left_bytes(DEVICE, 51) == 0
    stats["pool_bytes"] = 1500
    assert DeviceRoom().left_bytes(DEVICE, 51) > 0
    stats.update(pool_bytes=1600, largest_free_block_bytes=0)  # which means unknown
    assert DeviceRoom().left_bytes(DEVICE, 51) > 0


def test_cpu_devices_do_not_count_their_memory() -> None:
    assert read_stats(jax.devices("cpu")[0]) == {}
