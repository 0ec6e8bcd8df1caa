"""Serialized TPU topologies. Expected bytes come from TensorFlow 2.21."""

from __future__ import annotations

import hashlib

import pytest

from stratagem.devices.tpu_topology import TPUTopology

# Two hosts of two chips each, with two cores a chip.
_SHAPE = [2, 2, 1, 2]
_COORDINATES = [
    [[0, 0, 0, 0], [0, 0, 0, 1], [1, 0, 0, 0], [1, 0, 0, 1]],
    [[0, 1, 0, 0], [0, 1, 0, 1], [1, 1, 0, 0], [1, 1, 0, 1]],
]

_SERIALIZED = bytes.fromhex(
    "0a04020201021002180422200000000000000001010000000100000100010000000100010101000001010001"
)


@pytest.fixture
def topology() -> TPUTopology:
    return TPUTopology(mesh_shape=_SHAPE, device_coordinates=_COORDINATES)


def test_bytes_are_those_of_tensorflow(topology) -> None:
    assert topology.serialized() == _SERIALIZED
    places = [[[x, y, 0, 0] for y in range(16) for x in range(16)]]
    large = TPUTopology(mesh_shape=[16, 16, 1, 1], device_coordinates=places).serialized()
    assert len(large) == 1038
    assert hashlib.sha256(large).hexdigest().startswith("c7ec51ab419f0ffd")
    assert TPUTopology(large).device_coordinates.tolist() == places


def test_bytes_become_the_topology_again(topology) -> None:
    read = TPUTopology(_SERIALIZED)
    assert read.mesh_shape.tolist() == _SHAPE
    assert read.device_coordinates.tolist() == _COORDINATES
    # A later TensorFlow may add fields: a number, and a message within this one.
    assert TPUTopology(_SERIALIZED + b"\x30\x96\x01\x2a\x02\x08\x01").mesh_shape.tolist() == _SHAPE
