"""Synchronous training on the devices of this process, with one copy of the variables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from stratagem.strategies.local_topology import local_topology, parameter_device_of
from stratagem.strategies.strategy import Strategy
from stratagem.topology.devices import DeviceLike
from stratagem.variables import KeepAll, OnOneDevice

__all__ = ["CentralStorageStrategy"]


@final
class CentralStorageStrategy(Strategy):
    """Trains one model on several devices in lockstep, with one copy of the variables on the host.

    In each step the replicas get the values that they read and return summed gradients; the update
    runs where the variables are, with whatever the optimizer keeps. So a device needs room for the
    values and the gradients, and none for what the optimizer keeps.

    Args:
        compute_devices: names such as `"gpu:0"`, indices or `jax.Device`s, one a replica; None
            takes every local accelerator or, where there is none, every local CPU device.
        parameter_device: where the variables are; None for the only accelerator, or the host where
            there are several.

    Raises:
        ValueError: an empty list; an unknown, repeated or remote device.
        TypeError: devices of another type.

    Example:
        >>> sg.CentralStorageStrategy(["cpu:0", "cpu:1"], "cpu:0").num_replicas_in_sync
        2

    Source: TF 2.21 central_storage_strategy.py, CentralStorageStrategy.
    """

    def __init__(
        self,
        compute_devices: Sequence[DeviceLike] | None = None,
        parameter_device: DeviceLike | None = None,
    ) -> None:
        topology = local_topology(compute_devices, name="compute_devices")
        super().__init__(topology)
        if parameter_device is None and topology.devices and len(topology.devices) == 1:
            parameter_device = topology.devices[0]
        self.keeping = KeepAll(OnOneDevice(parameter_device_of(parameter_device)))
