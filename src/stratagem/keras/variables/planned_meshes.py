"""Meshes of `keras.distribution` on the devices of a plan, which do not exist."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from stratagem.devices.abstract_devices import planned_devices
from stratagem.keras.patches import patches
from stratagem.keras.private import jax_distribution


@patches(
    jax_distribution,
    "list_devices",
    why="a planned script sees the devices that it is planned for, and makes meshes of them",
)
def listing_planned_devices(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps what `keras.distribution.list_devices` and `DeviceMesh` ask for devices."""

    @functools.wraps(original)
    def list_devices(device_type: str | None = None) -> Any:
        devices = planned_devices() or ()
        names = [
            str(device)
            for device in devices
            if device_type is None or device.platform == device_type.lower()
        ]
        return names or original(device_type)

    return list_devices
