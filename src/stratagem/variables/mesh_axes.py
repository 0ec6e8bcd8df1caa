"""Axes of a Keras device mesh as axes of a strategy: replicas, and devices of a replica."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from stratagem.devices.mesh import REPLICA_AXIS, Topology

# Name of the axis of a replica's devices in layouts.
_LOGICAL = "logical"

# Usual names of the axis that splits batches. Otherwise it is the first, as in Keras.
_BATCH_NAMES = ("batch", "data")


def axis_names(layout_map: object, topology: Topology) -> dict[str, tuple[str, ...]]:
    """Returns the axes of the topology's mesh for each name that a layout may use.

    The names are "replica" and "logical", or those of a `LayoutMap`'s mesh: its batch axis stands
    for the replicas, the others for the devices of a replica if the sizes match.
    """
    mesh: Any = getattr(layout_map, "device_mesh", None)
    if mesh is None or _LOGICAL in mesh.axis_names:
        return {_LOGICAL: topology.logical_axes, REPLICA_AXIS: (topology.shard_axis,)}
    count = topology.num_logical_devices
    if len(mesh.shape) == 1 and mesh.shape[0] == count > 1:
        return {mesh.axis_names[0]: topology.logical_axes}
    batch = _batch_axis(mesh)
    of_batch: dict[str, tuple[str, ...]] = {mesh.axis_names[batch]: (topology.shard_axis,)}
    found = dict(of_batch)
    free = list(topology.logical_axes)
    for place, (name, size) in enumerate(zip(mesh.axis_names, mesh.shape, strict=True)):
        if place != batch:
            found[name] = _taken(free, topology, size)
            if math.prod(topology.mesh.shape[axis] for axis in found[name]) != size:
                return of_batch
    return of_batch if free else found


def groups_of_mesh(layout_map: object) -> list[list[Any]] | None:
    """Returns the devices of each replica in a `LayoutMap`'s mesh; None if it has no mesh."""
    mesh: Any = getattr(layout_map, "device_mesh", None)
    if mesh is None:
        return None
    devices = np.moveaxis(mesh.devices, _batch_axis(mesh), 0)
    return devices.reshape(len(devices), -1).tolist()


def devices_per_replica_of(layout_map: object) -> int:
    """Returns the number of devices of a replica in a `LayoutMap`'s mesh; 1 if it has no mesh."""
    groups = groups_of_mesh(layout_map)
    return 1 if groups is None else len(groups[0])


def _batch_axis(mesh: Any) -> int:
    names = list(mesh.axis_names)
    return next((names.index(name) for name in _BATCH_NAMES if name in names), 0)


def _taken(free: list[str], topology: Topology, size: int) -> tuple[str, ...]:
    """Removes and returns the first free axes, until their product is at least `size`."""
    taken: list[str] = []
    while free and math.prod(topology.mesh.shape[axis] for axis in taken) < size:
        taken.append(free.pop(0))
    return tuple(taken)
