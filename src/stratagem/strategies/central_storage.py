"""Synchronous training on the devices of this process, with one copy of the variables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from stratagem.strategies.local_topology import local_topology, parameter_device_of
from stratagem.strategies.offloaded_state import PINNED_HOST, OffloadedState, pinned_host_store
from stratagem.strategies.recreate import recreatable
from stratagem.strategies.strategy import Strategy
from stratagem.topology import Topology
from stratagem.topology.devices import DeviceLike
from stratagem.variables import Placement, SingleDeviceStore, UniformPlacement

__all__ = ["CentralStorageStrategy"]


@final
class CentralStorageStrategy(Strategy):
    """Trains one model on several devices in lockstep, with one copy of the variables on the host.

    In each step the replicas get the values that they read and return summed gradients; the update
    runs where the variables are, with whatever the optimizer keeps. So a device needs room for the
    values and the gradients, and none for what the optimizer keeps.

    With `parameter_device="pinned_host"` the one copy is in memory of the host that devices reach
    by themselves: each has a part of every variable there, brings it over within the step, updates
    it and puts it back, so that a step is one program and many steps are one call. Variables of
    less than 1,024 elements are copied to the devices then, and large tables that layers look rows
    up in are on the host as otherwise.

    Args:
        compute_devices: names such as `"gpu:0"`, indices or `jax.Device`s, one a replica; None
            takes every local accelerator or, where there is none, every local CPU device.
        parameter_device: where the variables are; None for the only accelerator, or the host where
            there are several; "pinned_host" for the host's pinned memory.

    Raises:
        ValueError: an empty list; an unknown, repeated or remote device; devices without pinned
            memory of the host.
        TypeError: devices of another type.

    Example:
        >>> sg.CentralStorageStrategy(["cpu:0", "cpu:1"], "cpu:0").num_replicas_in_sync
        2

    Source: TF 2.21 central_storage_strategy.py, CentralStorageStrategy.
    """

    @recreatable
    def __init__(
        self,
        compute_devices: Sequence[DeviceLike] | None = None,
        parameter_device: DeviceLike | None = None,
    ) -> None:
        topology = local_topology(compute_devices, name="compute_devices")
        super().__init__(topology, placement=_placement(topology, parameter_device))


def _placement(topology: Topology, parameter_device: DeviceLike | None) -> Placement:
    if parameter_device == PINNED_HOST:
        tables = SingleDeviceStore(parameter_device_of(None))
        return OffloadedState(pinned_host_store(topology), tables)
    if parameter_device is None and topology.devices and len(topology.devices) == 1:
        parameter_device = topology.devices[0]
    return UniformPlacement(SingleDeviceStore(parameter_device_of(parameter_device)))
