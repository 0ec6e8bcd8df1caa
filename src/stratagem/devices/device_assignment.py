"""Assignment of TPU devices to replicas, and places of devices on the chips.

Devices of other platforms stand in for TPU chips, in two columns per process, as on a TPU v5e host,
with the processes one below the other.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from stratagem.devices.tpu_topology import TPUTopology
from stratagem.errors import check_type, invalid

# Ring order of the chips in a box, with adjacent chips next to each other.

Position = tuple[int, int, int]


def ring_of(sizes: Sequence[int]) -> list[Position]:
    """Returns every position of a box as a ring, or row by row if it has none.

    In a ring, neighbors are one step apart, as are the last and the first. At least two sides must
    be longer than 1, and all such sides even.

    Source: TF 2.21 device_assignment.py, _ring_3d.
    """
    long = [axis for axis in range(3) if sizes[axis] > 1]
    is_odd = any(sizes[axis] % 2 for axis in long)
    if len(long) < 2 or is_odd:
        rows = itertools.product(*(range(sizes[axis]) for axis in (2, 1, 0)))
        return [(x, y, z) for z, y, x in rows]
    if len(long) == 2:
        first, second = long
        return [
            _position({first: one, second: other})
            for one, other in [(0, 0), *_open_ring(sizes[first], sizes[second])]
        ]
    # Layer by layer over all but the corner, and back through the corners.
    ring: list[Position] = [(0, 0, 0)]
    for z in range(sizes[2]):
        layer = [(x, y, z) for x, y in _open_ring(sizes[0], sizes[1])]
        ring += layer if z % 2 == 0 else layer[::-1]
    return ring + [(0, 0, z) for z in range(sizes[2] - 1, 0, -1)]


def _open_ring(width: int, height: int) -> list[tuple[int, int]]:
    """Returns a zigzag ring over a rectangle of even sides, without its first corner."""
    ring: list[tuple[int, int]] = []
    for row in range(height):
        columns = range(1, width)
        ring += [(column, row) for column in (columns if row % 2 == 0 else reversed(columns))]
    return ring + [(0, row) for row in range(height - 1, 0, -1)]


def _position(along: dict[int, int]) -> Position:
    return along.get(0, 0), along.get(1, 0), along.get(2, 0)


Integers = npt.NDArray[np.int32]


class DeviceOrderMode(enum.IntEnum):
    """Order of devices: as a ring, as a mesh, or as a ring where possible.

    Example:
        >>> topology = sg.tpu.Topology(
        ...     mesh_shape=[2, 1, 1, 1], device_coordinates=[[[0, 0, 0, 0], [1, 0, 0, 0]]]
        ... )
        >>> ring = sg.tpu.experimental.DeviceOrderMode.RING
        >>> assignment = sg.tpu.DeviceAssignment.build(
        ...     topology, num_replicas=2, device_order_mode=ring)
        >>> assignment.num_replicas
        2

    Source: TF 2.21 device_assignment.py, DeviceOrderMode.
    """

    AUTO = 0
    RING = 1
    MESH = 2


class DeviceAssignment:
    """Assigns positions in a TPU's mesh to the cores of each replica.

    Args:
        topology: topology of the TPU.
        core_assignment: int array of shape (replicas, cores per replica, 4), the coordinates x, y,
            z and core of each core.

    Raises:
        ValueError: a topology of another type, or an assignment of another shape.

    Example:
        >>> topology = sg.tpu.Topology(
        ...     mesh_shape=[2, 1, 1, 1], device_coordinates=[[[0, 0, 0, 0], [1, 0, 0, 0]]]
        ... )
        >>> assignment = sg.tpu.DeviceAssignment.build(topology, num_replicas=2)
        >>> assignment.tpu_device(replica=1)
        '/task:0/device:TPU:1'

    Source: TF 2.21 device_assignment.py, DeviceAssignment.
    """

    def __init__(self, topology: TPUTopology, core_assignment: object) -> None:
        _check_topology(topology)
        assignment = np.asarray(core_assignment, np.int32)
        if assignment.ndim != 3 or assignment.shape[2] != topology.mesh_rank:
            raise invalid(
                f"core_assignment has shape {assignment.shape}.",
                expected="shape (replicas, cores per replica, 4).",
                fix="call DeviceAssignment.build(topology, ...).",
            )
        self._topology = topology
        self._core_assignment = assignment
        self._replicas: dict[tuple[int, int], list[int]] = {}
        for replica, core in itertools.product(*map(range, assignment.shape[:2])):
            task = topology.task_ordinal_at_coordinates(assignment[replica, core])
            self._replicas.setdefault((task, core), []).append(replica)

    @property
    def topology(self) -> TPUTopology:
        """Topology of the TPU."""
        return self._topology

    @property
    def num_replicas(self) -> int:
        """Number of replicas."""
        return self._core_assignment.shape[0]

    @property
    def num_cores_per_replica(self) -> int:
        """Number of devices per replica."""
        return self._core_assignment.shape[1]

    @property
    def core_assignment(self) -> Integers:
        """Coordinates of each core, of shape (replicas, cores per replica, 4)."""
        return self._core_assignment

    def coordinates(self, replica: int, logical_core: int) -> tuple[int, ...]:
        """Returns the coordinates of a core.

        Args:
            replica: index of the replica.
            logical_core: index of the core in the replica.

        Returns:
            x, y, z and core.
        """
        return tuple(self._core_assignment[replica, logical_core].tolist())

    def lookup_replicas(self, task_id: int, logical_core: int) -> list[int]:
        """Returns the replicas that have a given core on the devices of a task.

        Args:
            task_id: index of the task.
            logical_core: index of the core in the replica.

        Returns:
            Replica indices in ascending order.

        Raises:
            ValueError: no replica has that core there.
        """
        replicas = self._replicas.get((task_id, logical_core))
        if replicas is None:
            raise invalid(
                f"No replica has core {logical_core} on task {task_id}.",
                expected=f"a task below {self._topology.num_tasks} and a core below "
                f"{self.num_cores_per_replica}.",
                fix="pass a task and core from `core_assignment`.",
            )
        return replicas

    def tpu_ordinal(self, replica: int = 0, logical_core: int = 0) -> int:
        """Returns the index of a core's device within its task.

        Args:
            replica: index of the replica.
            logical_core: index of the core in the replica.
        """
        position = self.coordinates(replica, logical_core)
        return self._topology.tpu_device_ordinal_at_coordinates(position)

    def host_device(self, replica: int = 0, logical_core: int = 0, job: str | None = None) -> str:
        """Returns the device name of the host of a core.

        Args:
            replica: index of the replica.
            logical_core: index of the core in the replica.
            job: task type to prefix the name with, or None.
        """
        position = self.coordinates(replica, logical_core)
        return self._topology.cpu_device_name_at_coordinates(position, job)

    def tpu_device(self, replica: int = 0, logical_core: int = 0, job: str | None = None) -> str:
        """Returns the device name of a core.

        Args:
            replica: index of the replica.
            logical_core: index of the core in the replica.
            job: task type to prefix the name with, or None.
        """
        position = self.coordinates(replica, logical_core)
        return self._topology.tpu_device_name_at_coordinates(position, job)

    @classmethod
    def build(
        cls,
        topology: TPUTopology | bytes,
        computation_shape: object = None,
        computation_stride: object = None,
        num_replicas: int = 1,
        device_order_mode: DeviceOrderMode = DeviceOrderMode.AUTO,
    ) -> DeviceAssignment:
        """Arranges replicas on a TPU, keeping the cores of each close together.

        Args:
            topology: topology of the TPU, or its `serialized()`.
            computation_shape: shape of a replica's block of cores, 4 ints; None for one core.
            computation_stride: distance between its cores, 4 ints; None for adjacent cores.
            num_replicas: number of replicas.
            device_order_mode: as a ring, as a mesh, or as a ring where possible: if the replicas
                use the whole TPU, without strides.

        Returns:
            The assignment.

        Raises:
            ValueError: invalid arguments, or replicas that do not fit on the TPU.

        Source: TF 2.21 device_assignment.py, device_assignment.
        """
        topology = TPUTopology(topology) if isinstance(topology, bytes) else topology
        _check_topology(topology)
        shape = _parse_shape(computation_shape, "computation_shape")
        stride = _parse_shape(computation_stride, "computation_stride")
        counts = _replicas_per_axis(topology, shape, stride)
        if not 0 < num_replicas <= np.prod(counts):
            raise invalid(
                f"num_replicas={num_replicas} does not fit on the TPU.",
                expected=f"1 to {np.prod(counts)} replicas of shape {shape.tolist()} and "
                f"stride {stride.tolist()} on a mesh of {topology.mesh_shape.tolist()}.",
                fix="use fewer or smaller replicas.",
            )
        if topology.missing_devices.size:
            return cls(topology, _arrange_by_task(topology, shape, stride, num_replicas))
        is_full = num_replicas == np.prod(counts) and np.prod(stride) == 1
        can_be_ring = is_full and shape[-1] == topology.mesh_shape[-1]
        if device_order_mode == DeviceOrderMode.RING and not can_be_ring:
            raise invalid(
                "These replicas cannot form a ring, as device_order_mode=RING requires.",
                expected="replicas that use the whole TPU without strides, and all cores of a "
                "chip.",
                fix="omit device_order_mode.",
            )
        if can_be_ring and device_order_mode != DeviceOrderMode.MESH:
            return cls(topology, _arrange_as_rings(shape, counts))
        return cls(
            topology,
            _arrange_as_mesh(shape, stride, _bounding_box(num_replicas, counts), num_replicas),
        )


def _check_topology(topology: object) -> None:
    fix = "pass what sg.tpu.initialize_tpu_system returned."
    wanted = "an sg.tpu.Topology"
    check_type("topology", topology, TPUTopology, wanted, fix, error=ValueError)


def _parse_shape(values: object, name: str) -> Integers:
    numbers = np.ones(4, np.int32) if values is None else np.asarray(values, np.int32)
    if numbers.shape != (4,) or (numbers < 1).any():
        raise invalid(
            f"{name}={values!r} is not valid.",
            expected="4 positive ints: chips along x, y and z, and cores per chip.",
            fix="pass [1, 1, 1, 2], for example.",
        )
    return numbers


def _replicas_per_axis(topology: TPUTopology, shape: Integers, stride: Integers) -> Integers:
    """Returns how many replicas fit along each axis; gaps of one hold others."""
    footprint = shape * stride
    if (footprint > topology.mesh_shape).any():
        raise invalid(
            f"A replica of shape {shape.tolist()} and stride {stride.tolist()} covers "
            f"{footprint.tolist()}, more than the mesh.",
            expected=f"at most {topology.mesh_shape.tolist()}.",
            fix="use a smaller computation_shape or computation_stride.",
        )
    return topology.mesh_shape // footprint * stride


def _bounding_box(num_replicas: int, counts: Integers) -> list[int]:
    """Returns a box of at least `num_replicas` positions, as close to a cube as possible.

    Fills the shortest axes first; among equal ones cores, then x, y and z, so that neighbors share
    a chip or a host where possible.
    """
    box = [0] * 4
    remaining, num_axes = num_replicas, 4
    for axis in sorted(range(4), key=lambda one: (counts[one], (one + 1) % 4)):
        box[axis] = min(math.ceil(remaining ** (1.0 / num_axes)), int(counts[axis]))
        remaining = -(-remaining // box[axis])
        num_axes -= 1
    return box


def _arrange_as_rings(shape: Integers, counts: Integers) -> list[list[list[int]]]:
    """Arranges replicas in a ring, and the chips of each replica in a ring."""
    block, num_cores = shape[:3], int(shape[3])
    inner = [np.array(position) for position in ring_of(block.tolist())]
    return [
        [
            [*(np.array(outer) * block + position).tolist(), core]
            for position in inner
            for core in range(num_cores)
        ]
        for outer in ring_of(counts[:3].tolist())
    ]


def _arrange_as_mesh(
    shape: Integers, stride: Integers, box: list[int], num_replicas: int
) -> list[list[list[int]]]:
    """Arranges replicas row by row, the cores of a chip first; interleaved ones are neighbors."""
    sizes = [range(int(count)) for count in (box[2], box[1], box[0], box[3])]
    blocks = [range(0, int(n * step), int(step)) for n, step in zip(shape, stride, strict=True)]
    cores = np.array(list(itertools.product(*blocks)))
    assignment: list[list[list[int]]] = []
    for z, y, x, core in itertools.islice(itertools.product(*sizes), num_replicas):
        number = np.array([x, y, z, core])
        start = number // stride * (shape * stride) + number % stride
        assignment.append((cores + start).tolist())
    return assignment


def _arrange_by_task(
    topology: TPUTopology, shape: Integers, stride: Integers, num_replicas: int
) -> Integers:
    """Assigns devices in task order, since missing chips may leave no mesh."""
    flat = topology.device_coordinates.reshape(-1, 4)
    num_cores = int(np.prod(shape))
    if np.prod(stride) != 1 or num_replicas * num_cores > len(flat):
        raise invalid(
            f"{num_replicas} replicas of {num_cores} cores with stride {stride.tolist()} do "
            f"not fit on a TPU with {len(topology.missing_devices)} missing devices.",
            expected=f"no strides, and at most its {len(flat)} devices.",
            fix="use fewer or smaller replicas.",
        )
    return flat[: num_replicas * num_cores].reshape(num_replicas, num_cores, 4)


# TPU slices: chips within one are directly connected, other slices are reached over a network.


def slice_of(device: object) -> int:
    """Returns the slice index of a `jax.Device`, or 0 if it has none."""
    return int(getattr(device, "slice_index", None) or 0)


def num_slices(devices: Sequence[jax.Device] | None) -> int:
    """Returns the number of slices of the devices, at least 1."""
    return len({slice_of(device) for device in devices or ()}) or 1


_Coordinates = tuple[int, int, int, int]


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
        raise invalid(
            f"The device assignment uses the coordinates {absent[0]} of a TPU of shape "
            f"{assignment.topology.mesh_shape.tolist()}.",
            expected="coordinates of this TPU, of shape "
            f"{tpu_topology_of(devices).mesh_shape.tolist()}.",
            fix="build it from the result of sg.tpu.initialize_tpu_system.",
        )
    repeated = [position for position in dict.fromkeys(used) if used.count(position) > 1]
    if repeated:
        raise invalid(
            f"The device assignment uses the coordinates {repeated[0]} "
            f"{used.count(repeated[0])} times.",
            expected="each device in one replica, once.",
            fix="remove the repeated coordinates from core_assignment.",
        )
    return [tuple(at[position] for position in group) for group in positions]


def _by_process(devices: Sequence[jax.Device]) -> list[list[jax.Device]]:
    members: dict[int, list[jax.Device]] = {}
    for device in devices:
        members.setdefault(device.process_index, []).append(device)
    return list(members.values())


def _coordinates_of(devices: Sequence[jax.Device]) -> dict[Any, _Coordinates]:
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
