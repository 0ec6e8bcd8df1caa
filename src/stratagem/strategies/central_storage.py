"""Central storage: synchronous training with one copy of the variables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from stratagem.devices.finding import DeviceLike
from stratagem.devices.mesh import Topology
from stratagem.strategies.base.strategy import Strategy, recreatable
from stratagem.strategies.membership import local_topology, parameter_device_of
from stratagem.strategies.placement import PINNED_HOST, OffloadedState, pinned_host_store
from stratagem.variables.placement import Placement, UniformPlacement
from stratagem.variables.sharded_store import SingleDeviceStore


@final
class CentralStorageStrategy(Strategy):
    """Trains one model on several devices in lockstep, with one copy of the variables on the host.

    In each step the replicas fetch the values that they read and return summed gradients; the
    optimizer update runs where the variables and their slots are stored. So a device needs
    memory for values and gradients, but not for slots.

    With `parameter_device="pinned_host"` the copy is in pinned host memory, which devices access
    directly. Each device holds a shard of every variable there; within the step it copies the shard
    in, updates it and copies it back. A step is then one program, and many steps are one call.
    Variables of less than 1,024 elements are replicated on the devices then, and large tables with
    lookups of rows stay in ordinary host memory.

    Args:
        compute_devices: names such as `"gpu:0"`, indices or `jax.Device`s, one per replica; None
            for every local accelerator or, without any, every local CPU device.
        parameter_device: device of the variables; None for the only accelerator, or the host if
            there are several; "pinned_host" for pinned host memory.

    Raises:
        ValueError: an empty list; an unknown, repeated or remote device; devices without pinned
            host memory.
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
