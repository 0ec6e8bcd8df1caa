"""Memory that copies of values may take on accelerators, beside the steps that follow."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

# One part of so many stays free, for what no statistics tell: fragments, other programs.
_RESERVE_PART = 16


@dataclasses.dataclass(frozen=True)
class _EarlierCopies:
    """Peak of a device without our copies, and what they took since then."""

    peak_bytes: int
    copies_bytes: int


class DeviceRoom:
    """Counts the free memory of devices while steps have their largest temporaries.

    Steps go on while copies exist, so their peak counts, not the memory between two steps.
    Earlier copies are in a later peak and are subtracted from it.
    """

    def __init__(self) -> None:
        self._seen: dict[jax.Device, _EarlierCopies] = {}

    def left_bytes(self, device: jax.Device, piece_bytes: int) -> int:
        """Returns the memory for copies; 0 if unknown, or if no piece of this size fits."""
        stats = read_stats(device)
        if "bytes_limit" not in stats or "bytes_in_use" not in stats:
            return 0
        limit_bytes = stats["bytes_limit"]
        if _largest_block_bytes(stats) < piece_bytes:
            return 0
        peak_bytes = max(self._peak_bytes(device, stats), stats["bytes_in_use"])
        return max(limit_bytes - peak_bytes - limit_bytes // _RESERVE_PART, 0)

    def take(self, device: jax.Device, size_bytes: int) -> None:
        """Records copies of this size, before they are made."""
        seen, stats = self._seen.get(device), read_stats(device)
        copies_bytes = max(size_bytes, 0 if seen is None else seen.copies_bytes)
        self._seen[device] = _EarlierCopies(self._peak_bytes(device, stats), copies_bytes)

    def _peak_bytes(self, device: jax.Device, stats: Mapping[str, int]) -> int:
        peak_bytes = stats.get("peak_bytes_in_use", 0)
        seen = self._seen.get(device)
        return peak_bytes if seen is None else max(seen.peak_bytes, peak_bytes - seen.copies_bytes)


def read_stats(device: jax.Device) -> Mapping[str, int]:
    """Returns the statistics of a device's memory; empty if it has none."""
    try:
        stats: Any = device.memory_stats()
    except (jax.errors.JaxRuntimeError, RuntimeError):  # the platform does not count
        return {}
    return stats or {}


def _largest_block_bytes(stats: Mapping[str, int]) -> int:
    """Returns the largest block that can be allocated: a free one, or new memory of the pool."""
    limit_bytes = stats["bytes_limit"]
    largest_bytes = stats.get("largest_free_block_bytes", 0)
    if largest_bytes <= 0 or "pool_bytes" not in stats:  # allocators that do not know it
        return limit_bytes
    return max(largest_bytes, limit_bytes - stats["pool_bytes"])


_room = DeviceRoom()


def device_room() -> DeviceRoom:
    """Returns the counts of this process."""
    return _room
