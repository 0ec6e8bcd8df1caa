"""Meshes of `keras.distribution` on the devices of a plan, which do not exist."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from stratagem.devices.abstract_devices import planned_devices


def listing_planned_devices(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `keras.distribution.list_devices`."""

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


def made_of_planned_devices(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `DeviceMesh.__init__`, for a mesh without a list of devices."""

    @functools.wraps(original)
    def initialize(
        self: object, shape: Any, axis_names: Any, devices: Any = None, **kwargs: Any
    ) -> None:
        if devices is None and (planned := planned_devices()) is not None:
            devices = [*map(str, planned)]
        original(self, shape, axis_names, devices, **kwargs)

    return initialize
