"""Slices of TPUs: chips that are wired to one another, where others are reached over a network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

__all__ = ["num_slices", "slice_of"]


def slice_of(device: Any) -> int:
    """Returns the number of the slice that a device belongs to; 0 for a device of no slice.

    Args:
        device: a `jax.Device`.
    """
    return int(getattr(device, "slice_index", None) or 0)


def num_slices(devices: Sequence[jax.Device] | None) -> int:
    """Returns how many slices devices belong to.

    Args:
        devices: of a topology; None for one device.
    """
    return len({slice_of(device) for device in devices or ()}) or 1
