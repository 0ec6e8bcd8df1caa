"""TPU topology. Expected values come from TensorFlow 2.21's tpu/topology.py."""

from __future__ import annotations

import re

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


def test_devices_are_counted(topology) -> None:
    assert topology.mesh_shape.tolist() == _SHAPE
    assert topology.mesh_rank == 4
    assert (topology.num_tasks, topology.num_tpus_per_task) == (2, 4)
    assert topology.device_coordinates.tolist() == _COORDINATES
    assert topology.missing_devices.tolist() == []


def test_devices_are_found_by_their_place(topology) -> None:
    assert topology.task_ordinal_at_coordinates([1, 1, 0, 0]) == 1
    assert topology.tpu_device_ordinal_at_coordinates([1, 1, 0, 1]) == 3
    name = topology.tpu_device_name_at_coordinates([1, 1, 0, 1], job="worker")
    assert name == "/job:worker/task:1/device:TPU:3"
    assert topology.cpu_device_name_at_coordinates([1, 1, 0, 1]) == "/task:1/device:CPU:0"


def test_missing_chips_are_named() -> None:
    coordinates = [[[0, 0, 0, 0]], [[1, 1, 0, 0]], [[0, 1, 0, 0]]]
    topology = TPUTopology(mesh_shape=[2, 2, 1, 1], device_coordinates=coordinates)
    assert topology.missing_devices.tolist() == [[1, 0, 0, 0]]
    assert topology.task_ordinal_at_coordinates([1, 0, 0, 0]) == -1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "mesh_shape=None is not a valid mesh shape"),
        ({"mesh_shape": [2, 2, 1]}, "mesh_shape=[2, 2, 1] is not a valid"),
        ({"mesh_shape": [2, 0, 1, 1]}, "mesh_shape=[2, 0, 1, 1] is not a valid"),
        ({"mesh_shape": _SHAPE}, "device_coordinates has shape (0,)"),
        (
            {"mesh_shape": _SHAPE, "device_coordinates": [[[0, 0, 0]]]},
            "device_coordinates has shape (1, 1, 3)",
        ),
        (
            {"mesh_shape": _SHAPE, "device_coordinates": [[[2, 0, 0, 0]]]},
            "device_coordinates has coordinates outside the mesh",
        ),
        ({"serialized": _SERIALIZED[:-3]}, "is not a TopologyProto: it ends within a field"),
        ({"serialized": b"\xff"}, "The serialized topology, 1 bytes, is not a TopologyProto"),
        ({"serialized": b"\x0d\x00"}, "is not a TopologyProto: field 1 has wire type 5"),
        ({"serialized": _SERIALIZED[:10]}, "The serialized topology has 0 coordinates"),
    ],
)
def test_invalid_topology_is_refused(arguments, message) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        TPUTopology(**arguments)
