"""Local devices of a strategy, from the user's argument."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from stratagem.messages import explain
from stratagem.topology import Topology, find_devices, local_devices
from stratagem.topology.abstract_devices import (
    AbstractDevice,
    planned_devices,
    planned_topology,
    refuse_to_plan,
)
from stratagem.topology.devices import DeviceLike, find_groups

__all__ = ["local_topology", "parameter_device_of"]


def local_topology(devices: object, *, name: str) -> Topology:
    """Returns the replicas on devices.

    Args:
        devices: one device, a list of them, or a list of equally long lists, one per replica; None
            for all local devices.
        name: name of the argument, for messages.

    Raises:
        TypeError: devices of another type.
        ValueError: an empty list; an unknown, repeated or remote device; lists of unequal length.
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
    if devices is None:
        return planned_topology(Topology(local_devices()))
    if any(isinstance(device, list | tuple) for device in devices):
        return planned_topology(Topology.of_groups(find_groups(devices)))
    return planned_topology(Topology(find_devices(list(devices))))


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
