"""Assignment of TPU devices to replicas. Expected values come from TensorFlow 2.21."""

from __future__ import annotations

import hashlib
import itertools
import re

import numpy as np
import pytest

from stratagem.devices.device_assignment import DeviceAssignment, DeviceOrderMode
from stratagem.devices.tpu_topology import TPUTopology


def full(shape: list[int], per_task: int = 4) -> TPUTopology:
    """A TPU without gaps: cores first, then x, y and z."""
    x, y, z, cores = map(range, shape)
    places = [[i, j, k, core] for k, j, i, core in itertools.product(z, y, x, cores)]
    return TPUTopology(mesh_shape=shape, device_coordinates=np.reshape(places, (-1, per_task, 4)))


def digest(assignment: DeviceAssignment) -> str:
    return hashlib.sha256(assignment.core_assignment.astype("int32").tobytes()).hexdigest()[:16]


@pytest.mark.parametrize(
    ("shape", "arguments", "size", "wanted"),
    [
        ([2, 2, 1, 2], {"num_replicas": 8}, (8, 1), "f090a4bbc1a3325a"),
        ([2, 2, 1, 2], {"num_replicas": 4}, (4, 1), "161cdd43f4fd4196"),
        (
            [2, 2, 1, 2],
            {"num_replicas": 4, "computation_shape": [1, 1, 1, 2]},
            (4, 2),
            "35bd8a62391eb3e2",
        ),
        (
            [2, 2, 1, 2],
            {
                "num_replicas": 4,
                "computation_shape": [1, 1, 1, 2],
                "device_order_mode": DeviceOrderMode.MESH,
            },
            (4, 2),
            "f090a4bbc1a3325a",
        ),
        ([4, 4, 1, 1], {"num_replicas": 16}, (16, 1), "0703a067f4d52143"),
        ([4, 4, 1, 1], {"num_replicas": 5}, (5, 1), "2675fb1551387339"),
        (
            [4, 4, 1, 1],
            {
                "num_replicas": 4,
                "computation_shape": [2, 2, 1, 1],
                "device_order_mode": DeviceOrderMode.RING,
            },
            (4, 4),
            "7cfe51dd66ce14a5",
        ),
        (
            [4, 4, 1, 1],
            {
                "num_replicas": 8,
                "computation_shape": [2, 1, 1, 1],
                "computation_stride": [2, 1, 1, 1],
            },
            (8, 2),
            "417330c8aa8f0ec8",
        ),
        ([4, 4, 4, 1], {"num_replicas": 64}, (64, 1), "e58df8d14f91e58f"),
        (
            [4, 4, 4, 1],
            {"num_replicas": 8, "computation_shape": [2, 2, 2, 1]},
            (8, 8),
            "15f0e7ea8480bd0b",
        ),
        ([3, 2, 1, 2], {"num_replicas": 12}, (12, 1), "c1f30905575a9a5d"),
        (
            [3, 2, 1, 2],
            {"num_replicas": 6, "computation_shape": [1, 1, 1, 2]},
            (6, 2),
            "c1f30905575a9a5d",
        ),
        ([2, 4, 1, 1], {"num_replicas": 3}, (3, 1), "e0a6bf44ed273c37"),
        ([8, 8, 1, 1], {"num_replicas": 27}, (27, 1), "094dedcf9507f3eb"),
    ],
)
def test_replicas_are_laid_out_as_tensorflow_lays_them_out(shape, arguments, size, wanted) -> None:
    topology = full(shape)
    for known in (topology, topology.serialized()):
        assignment = DeviceAssignment.build(known, **arguments)
        assert (assignment.num_replicas, assignment.num_cores_per_replica) == size
        assert digest(assignment) == wanted


def test_cores_are_named() -> None:
    topology = full([2, 2, 1, 2])
    assignment = DeviceAssignment.build(topology, computation_shape=[1, 1, 1, 2], num_replicas=4)
    assert assignment.topology is topology
    assert assignment.core_assignment.tolist() == [
        [[0, 0, 0, 0], [0, 0, 0, 1]],
        [[1, 0, 0, 0], [1, 0, 0, 1]],
        [[1, 1, 0, 0], [1, 1, 0, 1]],
        [[0, 1, 0, 0], [0, 1, 0, 1]],
    ]
    assert assignment.coordinates(1, 1) == (1, 0, 0, 1)
    assert assignment.lookup_replicas(1, 0) == [2, 3]
    assert assignment.tpu_device(3, 1, job="w") == "/job:w/task:1/device:TPU:1"
    assert assignment.host_device(3) == "/task:1/device:CPU:0"
    assert assignment.tpu_ordinal(3, 1) == 1
    with pytest.raises(ValueError, match="No replica has core 0 on task 2"):
        assignment.lookup_replicas(2, 0)


def test_where_chips_are_missing_devices_are_taken_in_their_order() -> None:
    coordinates = [[[0, 0, 0, 0]], [[1, 1, 0, 0]], [[0, 1, 0, 0]]]
    topology = TPUTopology(mesh_shape=[2, 2, 1, 1], device_coordinates=coordinates)
    assignment = DeviceAssignment.build(topology, num_replicas=2)
    assert assignment.core_assignment.tolist() == coordinates[:2]
    with pytest.raises(ValueError, match=r"4 replicas of 1 cores(?s:.)*at most its 3 devices"):
        DeviceAssignment.build(topology, num_replicas=4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_replicas": 17}, "num_replicas=17 does not fit"),
        ({"num_replicas": 0}, "num_replicas=0 does not fit"),
        ({"computation_shape": [1, 1]}, "computation_shape=[1, 1] is not valid"),
        ({"computation_shape": [1, 1, 1, 0]}, "computation_shape=[1, 1, 1, 0] is not valid"),
        ({"computation_stride": [0, 1, 1, 1]}, "computation_stride=[0, 1, 1, 1] is not valid"),
        ({"computation_shape": [4, 4, 1, 2]}, "covers [4, 4, 1, 2]"),
        (
            {"num_replicas": 5, "device_order_mode": DeviceOrderMode.RING},
            "as device_order_mode=RING requires",
        ),
    ],
)
def test_what_does_not_fit_is_refused(arguments, message) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        DeviceAssignment.build(full([4, 4, 1, 1]), **arguments)


def test_arguments_of_another_form_are_refused() -> None:
    with pytest.raises(ValueError, match="topology='v5e' is of type str"):
        DeviceAssignment.build("v5e")
    with pytest.raises(ValueError, match="topology=None is of type NoneType"):
        DeviceAssignment(None, [[[0, 0, 0, 0]]])
    with pytest.raises(ValueError, match=re.escape("core_assignment has shape (1, 4)")):
        DeviceAssignment(full([2, 2, 1, 1]), [[0, 0, 0, 0]])
