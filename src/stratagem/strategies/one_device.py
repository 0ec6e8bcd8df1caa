"""Single-device strategy, with the interface of the others."""

from __future__ import annotations

from typing import final

from stratagem.devices.finding import DeviceLike, find_devices
from stratagem.devices.mesh import Topology
from stratagem.strategies.base.strategy import Strategy, recreatable


@final
class OneDeviceStrategy(Strategy):
    """Puts variables and computation on one device.

    For code that opens a scope but should run undistributed, and for testing a program before it is
    distributed.

    Args:
        device: a name such as `"gpu:0"`, an index, or a `jax.Device`.

    Raises:
        ValueError: no such device.
        TypeError: a device of another type.

    Example:
        >>> sg.OneDeviceStrategy("cpu:0").num_replicas_in_sync
        1

    Source: TF 2.21 one_device_strategy.py, OneDeviceStrategy.
    """

    @recreatable
    def __init__(self, device: DeviceLike) -> None:
        super().__init__(Topology(find_devices([device])))
