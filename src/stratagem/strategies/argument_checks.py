"""Checks of the arguments of strategies and of `Strategy.run`."""

from __future__ import annotations

from stratagem.devices.communication import CommunicationOptions
from stratagem.devices.compression import Compression
from stratagem.devices.device_assignment import DeviceAssignment
from stratagem.devices.mesh import Topology
from stratagem.errors import explain
from stratagem.strategies.cross_device_ops import CrossDeviceOps
from stratagem.variables.placement import Placement


def check_parts(topology: object, cross_device_ops: object) -> None:
    """Raises a TypeError unless the arguments are a topology and cross-device ops."""
    if not isinstance(topology, Topology):
        raise TypeError(
            explain(
                f"topology={topology!r} is of type {type(topology).__name__}.",
                expected="a stratagem.devices.mesh.Topology.",
                fix="make one from devices: Topology(find_devices([...])).",
            )
        )
    if not isinstance(cross_device_ops, CrossDeviceOps | None):
        raise TypeError(
            explain(
                f"cross_device_ops={cross_device_ops!r} is of type "
                f"{type(cross_device_ops).__name__}.",
                expected="an sg.CrossDeviceOps, or None to choose.",
                fix="leave cross_device_ops out, or pass sg.RingAllReduce(), for example.",
            )
        )


def check_compression(
    compression: Compression | None, topology: Topology, placement: Placement
) -> None:
    """Raises a ValueError if gradients are compressed that are not summed whole on each replica."""
    is_whole = not (topology.groups or placement.uses_stores or placement.is_remote)
    if compression is None or is_whole:
        return
    kept = "over the devices of a replica" if topology.groups else f"by {placement}"
    raise ValueError(
        explain(
            f"compression={compression} was given, and variables are placed {kept}.",
            expected="a whole copy of every variable on each replica's one device: errors of "
            "gradients are kept whole, and parts of gradients are summed elsewhere.",
            fix="leave the compression out, or shard_state, layout_map, placement and "
            "devices_per_replica.",
        )
    )


def checked_communication(options: object) -> CommunicationOptions:
    """Returns the communication options of a multi-worker strategy; refuses another type."""
    if options is None:
        return CommunicationOptions()
    if not isinstance(options, CommunicationOptions):
        raise ValueError(
            explain(
                f"communication_options={options!r} is of type {type(options).__name__}.",
                expected="sg.CommunicationOptions, or None.",
                fix="leave communication_options out.",
            )
        )
    return options


def check_device_assignment(assignment: object) -> None:
    """Raises a ValueError unless a TPUStrategy got a device assignment or None."""
    if isinstance(assignment, int):
        raise ValueError(
            explain(
                f"experimental_device_assignment={assignment} is a number.",
                expected="an sg.tpu.experimental.DeviceAssignment; in TensorFlow 1, the steps per "
                "call were in its place.",
                fix=f"write steps_per_run={assignment}.",
            )
        )
    if not isinstance(assignment, DeviceAssignment | None):
        raise ValueError(
            explain(
                f"experimental_device_assignment={assignment!r} is of type "
                f"{type(assignment).__name__}.",
                expected="an sg.tpu.experimental.DeviceAssignment, or None.",
                fix="make one with DeviceAssignment.build(topology, num_replicas=...).",
            )
        )


def refuse_both_groupings(device_assignment: object, devices_per_replica: object) -> None:
    """Raises a ValueError if a strategy got a number of devices beside a device assignment."""
    if device_assignment is not None and devices_per_replica is not None:
        raise ValueError(
            explain(
                f"devices_per_replica={devices_per_replica!r} and a device assignment were given.",
                expected="at most one of them: each groups the devices.",
                fix="leave one of them out.",
            )
        )


def check_steps_per_run(steps_per_run: int | None) -> None:
    """Raises a ValueError unless the number of steps is positive or None."""
    is_count = isinstance(steps_per_run, int) and not isinstance(steps_per_run, bool)
    if steps_per_run is not None and not (is_count and steps_per_run > 0):
        raise ValueError(
            explain(
                f"steps_per_run={steps_per_run!r} is not a number of steps.",
                expected="an integer of at least 1, or None.",
                fix="pass 8, for example, or leave it out.",
            )
        )


def checked_sequence_axis(axis: int | None, topology: Topology) -> int | None:
    """Returns the axis; raises a ValueError for the batch axis, or replicas of one device."""
    if axis is None:
        return None
    if not isinstance(axis, int) or isinstance(axis, bool) or axis < 1:
        raise ValueError(
            explain(
                f"sequence_axis={axis!r} is not an axis after the batch.",
                expected="an integer of at least 1, or None: axis 0 is split over replicas.",
                fix="pass 1 for arrays of shape (batch, sequence, ...).",
            )
        )
    if topology.num_logical_devices == 1:
        raise ValueError(
            explain(
                f"sequence_axis={axis} was given for replicas of one device.",
                expected="replicas of several devices, over which sequences are split.",
                fix="pass devices_per_replica=, too, or leave sequence_axis out.",
            )
        )
    return axis
