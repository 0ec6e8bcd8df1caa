"""Coordinates of JAX devices in a TPU's mesh, and the order in which they become replicas.

Devices of other platforms stand in for TPU chips, in two columns per process, as on a TPU v5e host,
with the processes one below the other.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from stratagem.devices.device_assignment import DeviceAssignment, ring_of
from stratagem.devices.tpu_topology import TPUTopology
from stratagem.errors import explain

# TPU slices: chips within one are directly connected, other slices are reached over a network.


def slice_of(device: object) -> int:
    """Returns the slice index of a `jax.Device`, or 0 if it has none."""
    return int(getattr(device, "slice_index", None) or 0)


def num_slices(devices: Sequence[jax.Device] | None) -> int:
    """Returns the number of slices of the devices, at least 1."""
    return len({slice_of(device) for device in devices or ()}) or 1


Position = tuple[int, int, int, int]


def tpu_topology_of(devices: Sequence[jax.Device]) -> TPUTopology:
    """Returns the TPU topology of the devices of all processes.

    Slices, each with its own coordinates, are placed one after the other along z.
    """
    positions = _coordinates_of(devices)
    shape = np.max(np.array(list(positions.values())), axis=0) + 1
    coordinates = [[positions[device] for device in own] for own in _by_process(devices)]
    return TPUTopology(mesh_shape=shape, device_coordinates=coordinates)


def in_ring_order(devices: Sequence[jax.Device]) -> tuple[jax.Device, ...]:
    """Orders the devices of each process so that neighbors are adjacent, where possible.

    The order of processes stays, since the replicas of one must be contiguous. JAX's
    `mesh_utils.create_device_mesh` makes such rings only for some single-host TPUs.
    """
    ordered: list[jax.Device] = []
    for own in _by_process(devices):
        positions = _coordinates_of(own)
        lowest = np.min(np.array(list(positions.values())), axis=0)
        at = {
            tuple((np.array(position) - lowest).tolist()): one
            for one, position in positions.items()
        }
        width, depth, height, cores = (
            max(position[axis] for position in at) + 1 for axis in range(4)
        )
        ring = itertools.product(ring_of((width, depth, height)), range(cores))
        found = [at.get((*chip, core)) for chip, core in ring]
        ordered += own if None in found else [one for one in found if one is not None]
    return tuple(ordered)


def assigned_devices(
    assignment: DeviceAssignment, devices: Sequence[jax.Device]
) -> list[tuple[jax.Device, ...]]:
    """Returns each replica's devices.

    Raises:
        ValueError: the assignment is for another TPU, or has a position twice.
    """
    at: dict[tuple[int, ...], jax.Device] = {
        position: device for device, position in _coordinates_of(devices).items()
    }
    positions: list[list[tuple[int, ...]]] = [
        [assignment.coordinates(replica, core) for core in range(assignment.num_cores_per_replica)]
        for replica in range(assignment.num_replicas)
    ]
    used = [position for group in positions for position in group]
    absent = [position for position in used if position not in at]
    if absent:
        raise ValueError(
            explain(
                f"The device assignment uses the coordinates {absent[0]} of a TPU of shape "
                f"{assignment.topology.mesh_shape.tolist()}.",
                expected="coordinates of this TPU, of shape "
                f"{tpu_topology_of(devices).mesh_shape.tolist()}.",
                fix="build it from the result of sg.tpu.experimental.initialize_tpu_system.",
            )
        )
    repeated = [position for position in dict.fromkeys(used) if used.count(position) > 1]
    if repeated:
        raise ValueError(
            explain(
                f"The device assignment uses the coordinates {repeated[0]} "
                f"{used.count(repeated[0])} times.",
                expected="each device in one replica, once.",
                fix="remove the repeated coordinates from core_assignment.",
            )
        )
    return [tuple(at[position] for position in group) for group in positions]


def _by_process(devices: Sequence[jax.Device]) -> list[list[jax.Device]]:
    members: dict[int, list[jax.Device]] = {}
    for device in devices:
        members.setdefault(device.process_index, []).append(device)
    return list(members.values())


def _coordinates_of(devices: Sequence[jax.Device]) -> dict[Any, Position]:
    """Returns x, y, z and core of each device."""
    if not all(hasattr(device, "coords") for device in devices):
        columns = 2 if max(map(len, _by_process(devices))) % 2 == 0 else 1
        return {
            device: (index % columns, (index // columns) + number * len(own) // columns, 0, 0)
            for number, own in enumerate(_by_process(devices))
            for index, device in enumerate(own)
        }
    known: Sequence[Any] = devices  # attributes of a TPU's devices
    depth = max(device.coords[2] for device in known) + 1
    slices = sorted({slice_of(device) for device in known})
    return {
        device: (
            device.coords[0],
            device.coords[1],
            device.coords[2] + depth * slices.index(slice_of(device)),
            device.core_on_chip,
        )
        for device in known
    }
