"""`TPUTopology`: the shape of a TPU's mesh, and the coordinates of each host's devices."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from stratagem.errors import invalid

# Serialization of a TPU topology as TensorFlow's `TopologyProto`.
#
# Supports only the protobuf wire format of this message: integers, single and in packed lists.
#
# Source: TensorFlow, core/protobuf/tpu/topology.proto; protobuf.dev, Encoding.

_MESH_SHAPE, _NUM_TASKS, _NUM_DEVICES, _COORDINATES = 1, 2, 3, 4
_NUMBER, _BYTES = 0, 2  # kinds of fields

# The shape of a mesh, or coordinates of shape (tasks, devices, axes).
Coordinates = npt.NDArray[np.int32]


def _encoded(mesh_shape: Coordinates, coordinates: Coordinates) -> bytes:
    num_tasks, num_devices, _ = coordinates.shape
    return (
        _encode_packed(_MESH_SHAPE, mesh_shape.tolist())
        + _encode_single(_NUM_TASKS, num_tasks)
        + _encode_single(_NUM_DEVICES, num_devices)
        + _encode_packed(_COORDINATES, coordinates.ravel().tolist())
    )


def _parsed(data: bytes) -> tuple[list[int], Coordinates]:
    """Returns the shape of the mesh and the coordinates; raises ValueError for malformed data."""
    found: dict[int, list[int]] = defaultdict(list)
    try:
        for field, values in _parse_fields(data):
            found[field] += values
    except IndexError:
        raise _unreadable_error(data, "it ends within a field") from None
    mesh_shape, numbers = found[_MESH_SHAPE], found[_COORDINATES]
    counts = [[0, *found[field]][-1] for field in (_NUM_TASKS, _NUM_DEVICES)]
    shape = (*counts, len(mesh_shape))
    if len(numbers) != np.prod(shape):
        raise invalid(
            f"The serialized topology has {len(numbers)} coordinates.",
            expected=f"{np.prod(shape)}, for an array of shape {shape}.",
            fix="pass what Topology.serialized() returned.",
        )
    return mesh_shape, np.array(numbers, np.int32).reshape(shape)


def _encode_varint(number: int) -> bytes:
    """Encodes seven bits per byte, lowest first; the eighth bit marks that more follow."""
    parts = bytearray()
    while number > 0x7F:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*parts, number])


def _encode_single(field: int, number: int) -> bytes:
    return _encode_varint(field << 3 | _NUMBER) + _encode_varint(number) if number else b""


def _encode_packed(field: int, numbers: list[int]) -> bytes:
    content = b"".join(map(_encode_varint, numbers))
    return (
        _encode_varint(field << 3 | _BYTES) + _encode_varint(len(content)) + content
        if numbers
        else b""
    )


def _parse_fields(data: bytes) -> Iterator[tuple[int, list[int]]]:
    """Yields the fields with their numbers; raises ValueError for other wire types."""
    position = 0
    while position < len(data):
        tag, position = _read_varint(data, position)
        field, kind = tag >> 3, tag & 7
        if kind == _NUMBER:
            number, position = _read_varint(data, position)
            yield field, [number]
        elif kind == _BYTES:
            length, position = _read_varint(data, position)
            content, position = data[position : position + length], position + length
            if len(content) < length:
                raise _unreadable_error(data, "it ends within a field")
            if field in (_MESH_SHAPE, _COORDINATES):
                yield field, list(_parse_varints(content))
        else:
            raise _unreadable_error(data, f"field {field} has wire type {kind}")


def _unreadable_error(data: bytes, why: str) -> ValueError:
    return invalid(
        f"The serialized topology, {len(data)} bytes, is not a TopologyProto: {why}.",
        expected="a serialized TopologyProto.",
        fix="pass what Topology.serialized() returned.",
    )


def _parse_varints(content: bytes) -> Iterator[int]:
    position = 0
    while position < len(content):
        number, position = _read_varint(content, position)
        yield number


def _read_varint(data: bytes, position: int) -> tuple[int, int]:
    number, shift = 0, 0
    while True:
        byte = data[position]
        number |= (byte & 0x7F) << shift
        position, shift = position + 1, shift + 7
        if byte < 0x80:
            return number, position


class TPUTopology:
    """The devices of a TPU: the shape of its mesh, and the coordinates of each device.

    Args:
        serialized: result of another topology's `serialized()`; the other arguments are then
            ignored.
        mesh_shape: 4 positive ints: chips along x, y and z, and cores per chip.
        device_coordinates: int array of shape (tasks, devices per task, 4): x, y, z and core of
            each device.

    Raises:
        ValueError: an argument of another shape, or coordinates outside the mesh.

    Example:
        >>> topology = sg.tpu.Topology(
        ...     mesh_shape=[2, 1, 1, 1], device_coordinates=[[[0, 0, 0, 0], [1, 0, 0, 0]]]
        ... )
        >>> topology.num_tasks, topology.num_tpus_per_task
        (1, 2)

    Source: TF 2.21 tpu/topology.py, Topology.
    """

    def __init__(
        self,
        serialized: bytes | None = None,
        mesh_shape: object = None,
        device_coordinates: object = None,
    ) -> None:
        if serialized:
            mesh_shape, device_coordinates = _parsed(serialized)
        self._mesh_shape = _as_int_array(mesh_shape)
        if self._mesh_shape.shape != (4,) or (self._mesh_shape < 1).any():
            raise invalid(
                f"mesh_shape={mesh_shape!r} is not a valid mesh shape.",
                expected="4 positive ints: chips along x, y and z, and cores per chip.",
                fix="pass [4, 4, 1, 1], for example.",
            )
        self._device_coordinates = _as_int_array(device_coordinates)
        shape = self._device_coordinates.shape
        if len(shape) != 3 or shape[2] != 4:
            raise invalid(
                f"device_coordinates has shape {shape}.",
                expected="shape (tasks, devices per task, 4).",
                fix="pass the coordinates x, y, z and core of each device.",
            )
        if ((self._device_coordinates < 0) | (self._device_coordinates >= self._mesh_shape)).any():
            raise invalid(
                "device_coordinates has coordinates outside the mesh.",
                expected=f"coordinates from 0 to below {self._mesh_shape.tolist()}.",
                fix="correct device_coordinates or mesh_shape.",
            )
        self._tasks, self._ordinals = self._invert()

    def _invert(self) -> tuple[Coordinates, Coordinates]:
        """Returns the task and device index at each position, -1 where there is no device."""
        tasks = np.full(self._mesh_shape, -1, np.int32)
        ordinals = np.full(self._mesh_shape, -1, np.int32)
        for task, devices in enumerate(self._device_coordinates):
            for ordinal, position in enumerate(devices):
                tasks[tuple(position)] = task
                ordinals[tuple(position)] = ordinal
        return tasks, ordinals

    @property
    def mesh_shape(self) -> Coordinates:
        """Chips along x, y and z, and cores per chip."""
        return self._mesh_shape

    @property
    def mesh_rank(self) -> int:
        """Number of dimensions of the mesh: 4."""
        return len(self._mesh_shape)

    @property
    def device_coordinates(self) -> Coordinates:
        """Coordinates of each device, of shape (tasks, devices per task, 4)."""
        return self._device_coordinates

    @property
    def missing_devices(self) -> npt.NDArray[np.int64]:
        """Coordinates without a device, of shape (missing, 4)."""
        return np.argwhere(self._tasks < 0)

    @property
    def num_tasks(self) -> int:
        """Number of hosts, which is the number of JAX processes."""
        return self._device_coordinates.shape[0]

    @property
    def num_tpus_per_task(self) -> int:
        """Number of devices per host."""
        return self._device_coordinates.shape[1]

    def task_ordinal_at_coordinates(self, device_coordinates: Iterable[int]) -> int:
        """Returns the index of the task whose device is at the coordinates, or -1.

        Args:
            device_coordinates: x, y, z and core.
        """
        return int(self._tasks[tuple(device_coordinates)])

    def tpu_device_ordinal_at_coordinates(self, device_coordinates: Iterable[int]) -> int:
        """Returns the index, within its task, of the device at the coordinates, or -1.

        Args:
            device_coordinates: x, y, z and core.
        """
        return int(self._ordinals[tuple(device_coordinates)])

    def cpu_device_name_at_coordinates(
        self, device_coordinates: Iterable[int], job: str | None = None
    ) -> str:
        """Returns the device name of the host of the device at the coordinates.

        Args:
            device_coordinates: x, y, z and core.
            job: task type to prefix the name with, or None.
        """
        return f"{self._task_name(device_coordinates, job)}/device:CPU:0"

    def tpu_device_name_at_coordinates(
        self, device_coordinates: Iterable[int], job: str | None = None
    ) -> str:
        """Returns the name of the device at the coordinates.

        Args:
            device_coordinates: x, y, z and core.
            job: task type to prefix the name with, or None.
        """
        ordinal = self.tpu_device_ordinal_at_coordinates(device_coordinates)
        return f"{self._task_name(device_coordinates, job)}/device:TPU:{ordinal}"

    def _task_name(self, device_coordinates: Iterable[int], job: str | None) -> str:
        task = f"/task:{self.task_ordinal_at_coordinates(device_coordinates)}"
        return task if job is None else f"/job:{job}{task}"

    def serialized(self) -> bytes:
        """Returns the topology as a serialized `TopologyProto`, which TensorFlow reads, too."""
        return _encoded(self._mesh_shape, self._device_coordinates)


def _as_int_array(values: object) -> Coordinates:
    return np.asarray([] if values is None else values, np.int32)
