"""Local devices of a strategy, from the user's argument."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from stratagem.devices.abstract_devices import (
    AbstractDevice,
    planned_devices,
    planned_topology,
    refuse_to_plan,
)
from stratagem.devices.finding import DeviceLike, find_devices, find_groups, local_devices
from stratagem.devices.mesh import Topology, adjacent_groups
from stratagem.errors import explain


def local_topology(
    devices: object, *, name: str, devices_per_replica: int | None = None
) -> Topology:
    """Returns the replicas on devices.

    Args:
        devices: one device, a list of them, or a list of equally long lists, one per replica; None
            for all local devices.
        name: name of the argument, for messages.
        devices_per_replica: number of adjacent devices per replica; None for one, or as listed.

    Raises:
        TypeError: devices of another type.
        ValueError: an empty list; an unknown, repeated or remote device; lists of unequal length;
            lists and `devices_per_replica`, or one that does not divide the devices.
    """
    if isinstance(devices, str | jax.Device):
        devices = [devices]
    if devices is not None and not isinstance(devices, Sequence):
        raise TypeError(
            explain(
                f"{name}={devices!r} is of type {type(devices).__name__}.",
                expected="a list of devices, one a replica, or None for all local ones.",
                fix=f'write {name}=["gpu:0", "gpu:1"].',
            )
        )
    if devices is not None and any(isinstance(device, list | tuple) for device in devices):
        if devices_per_replica is not None:
            raise ValueError(
                explain(
                    f"{name}={devices!r} and devices_per_replica={devices_per_replica!r} "
                    "were given.",
                    expected="at most one of them: each groups the devices.",
                    fix=f"leave one of them out, or list the devices of {name} without groups.",
                )
            )
        return planned_topology(Topology.of_groups(find_groups(devices)))
    found = local_devices() if devices is None else find_devices(list(devices))
    if devices_per_replica is None:
        return planned_topology(Topology(found))
    return planned_topology(Topology.of_groups(adjacent_groups(found, devices_per_replica)))


def parameter_device_of(device: DeviceLike | None) -> jax.Device:
    """Returns the device for single-copy variables; None selects the host.

    Raises:
        ValueError: an unknown or remote device, or no host that JAX may use.
    """
    if device is not None and planned_devices() is not None:
        name = device.platform if isinstance(device, jax.Device | AbstractDevice) else str(device)
        if not name.lower().removeprefix("/").removeprefix("device:").startswith("cpu"):
            refuse_to_plan(f"A strategy with variables on {device}")
        device = None
    if device is not None:
        return find_devices([device])[0]
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError as error:
        raise ValueError(
            explain(
                f"JAX was told to leave the host out: {error}",
                expected="the platform cpu beside that of the replicas: the host keeps variables.",
                fix="set JAX_PLATFORMS=cuda,cpu or unset it, or pass parameter_device.",
            )
        ) from error
