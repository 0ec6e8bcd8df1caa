"""Checks of the arguments of strategies and of `Strategy.run`."""

from __future__ import annotations

from typing import Any

from stratagem.devices.communication import CommunicationOptions
from stratagem.devices.compression import Compression
from stratagem.devices.device_assignment import DeviceAssignment
from stratagem.devices.mesh import Topology
from stratagem.errors import check_number, check_type, invalid
from stratagem.strategies.cross_device_ops import CrossDeviceOps
from stratagem.variables.placement import Replicated


def check_parts(topology: object, cross_device_ops: object) -> None:
    """Raises a TypeError unless the arguments are a topology and cross-device ops."""
    fix = "make one from devices: Topology(find_devices([...]))."
    check_type("topology", topology, Topology, "a stratagem.devices.mesh.Topology", fix)
    wanted = "an sg.CrossDeviceOps such as sg.RingAllReduce(), or None to choose"
    check_type("cross_device_ops", cross_device_ops, CrossDeviceOps | None, wanted)


def check_compression(
    compression: Compression | None, topology: Topology, placement: Replicated
) -> None:
    """Raises a ValueError if gradients are compressed that are not summed whole on each replica."""
    is_whole = not (topology.groups or placement.uses_stores or placement.is_remote)
    if compression is None or is_whole:
        return
    kept = "over the devices of a replica" if topology.groups else f"by {placement}"
    raise invalid(
        f"compression={compression} was given, and variables are placed {kept}.",
        expected="a whole copy of every variable on each replica's one device: errors of "
        "gradients are kept whole, and parts of gradients are summed elsewhere.",
        fix="leave the compression out, or shard_state, layout_map, placement and "
        "devices_per_replica.",
    )


def checked_communication(options: Any) -> CommunicationOptions:
    """Returns the communication options of a multi-worker strategy; refuses another type."""
    wanted, kind = "sg.CommunicationOptions, or None", CommunicationOptions | None
    check_type("communication_options", options, kind, wanted, error=ValueError)
    return options or CommunicationOptions()


def check_device_assignment(assignment: object) -> None:
    """Raises a ValueError unless a TPUStrategy got a device assignment or None."""
    if isinstance(assignment, int):
        raise invalid(
            f"experimental_device_assignment={assignment} is a number.",
            expected="an sg.tpu.experimental.DeviceAssignment; in TensorFlow 1, the steps per "
            "call were in its place.",
            fix=f"write steps_per_run={assignment}.",
        )
    fix = "make one with DeviceAssignment.build(topology, num_replicas=...)."
    wanted, kind = "an sg.tpu.experimental.DeviceAssignment, or None", DeviceAssignment | None
    check_type("experimental_device_assignment", assignment, kind, wanted, fix, error=ValueError)


def refuse_both_groupings(device_assignment: object, devices_per_replica: object) -> None:
    """Raises a ValueError if a strategy got a number of devices beside a device assignment."""
    if device_assignment is not None and devices_per_replica is not None:
        raise invalid(
            f"devices_per_replica={devices_per_replica!r} and a device assignment were given.",
            expected="at most one of them: each groups the devices.",
            fix="leave one of them out.",
        )


def checked_sequence_axis(axis: int | None, topology: Topology) -> int | None:
    """Returns the axis; raises a ValueError for the batch axis, or replicas of one device."""
    if axis is None:
        return None
    check_number("The strategy", sequence_axis=axis)
    if topology.num_logical_devices == 1:
        raise invalid(
            f"sequence_axis={axis} was given for replicas of one device.",
            expected="replicas of several devices, over which sequences are split.",
            fix="pass devices_per_replica=, too, or leave sequence_axis out.",
        )
    return axis
