"""TPU slices: chips within one are directly connected, other slices are reached over a network."""

from __future__ import annotations

from collections.abc import Sequence

import jax


def slice_of(device: object) -> int:
    """Returns the slice index of a `jax.Device`, or 0 if it has none."""
    return int(getattr(device, "slice_index", None) or 0)


def num_slices(devices: Sequence[jax.Device] | None) -> int:
    """Returns the number of slices of the devices, at least 1."""
    return len({slice_of(device) for device in devices or ()}) or 1
