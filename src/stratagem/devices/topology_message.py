"""Serialization of a TPU topology as TensorFlow's `TopologyProto`.

Supports only the protobuf wire format of this message: integers, single and in packed lists.

Source: TensorFlow, core/protobuf/tpu/topology.proto; protobuf.dev, Encoding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from stratagem.messages import explain

_MESH_SHAPE, _NUM_TASKS, _NUM_DEVICES, _COORDINATES = 1, 2, 3, 4
_NUMBER, _BYTES = 0, 2  # kinds of fields


@dataclasses.dataclass(frozen=True)
class TopologyMessage:
    """Fields of a `TopologyProto`.

    `mesh_shape` are chips along x, y and z, and cores per chip; `num_devices` is per task;
    `flat_coordinates` are the coordinates of all devices, concatenated.
    """

    mesh_shape: list[int]
    num_tasks: int
    num_devices: int
    flat_coordinates: list[int]

    def coordinates(self) -> npt.NDArray[np.int32]:
        """Returns the coordinates as an array of shape (tasks, devices, axes)."""
        shape = (self.num_tasks, self.num_devices, len(self.mesh_shape))
        if len(self.flat_coordinates) != np.prod(shape):
            raise ValueError(
                explain(
                    f"The serialized topology has {len(self.flat_coordinates)} coordinates.",
                    expected=f"{np.prod(shape)}, for an array of shape {shape}.",
                    fix="pass what Topology.serialized() returned.",
                )
            )
        return np.array(self.flat_coordinates, np.int32).reshape(shape)

    def to_bytes(self) -> bytes:
        """Returns the serialized message."""
        return (
            _encode_packed(_MESH_SHAPE, self.mesh_shape)
            + _encode_single(_NUM_TASKS, self.num_tasks)
            + _encode_single(_NUM_DEVICES, self.num_devices)
            + _encode_packed(_COORDINATES, self.flat_coordinates)
        )

    @staticmethod
    def parse(data: bytes) -> TopologyMessage:
        """Parses a serialized message; raises ValueError if it is malformed."""
        found: dict[int, list[int]] = {}
        try:
            for field, values in _parse_fields(data):
                found.setdefault(field, []).extend(values)
        except IndexError:
            raise _unreadable_error(data, "it ends within a field") from None
        return TopologyMessage(
            found.get(_MESH_SHAPE, []),
            found.get(_NUM_TASKS, [0])[-1],
            found.get(_NUM_DEVICES, [0])[-1],
            found.get(_COORDINATES, []),
        )


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
    return ValueError(
        explain(
            f"The serialized topology, {len(data)} bytes, is not a TopologyProto: {why}.",
            expected="a serialized TopologyProto.",
            fix="pass what Topology.serialized() returned.",
        )
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
