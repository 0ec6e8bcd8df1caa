"""Assignment of TPU devices to replicas. Expected values come from TensorFlow 2.21."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import re

import numpy as np
import pytest

from stratagem.cluster.addresses import free_ports
from stratagem.devices import processes
from stratagem.devices.device_assignment import DeviceAssignment, DeviceOrderMode, ring_of
from stratagem.devices.tpu_topology import TPUTopology
from tests.fresh_process import run_fresh


def full(shape: list[int], per_task: int = 4) -> TPUTopology:
    """A TPU without gaps: cores first, then x, y and z."""
    x, y, z, cores = map(range, shape)
    places = [[i, j, k, core] for k, j, i, core in itertools.product(z, y, x, cores)]
    return TPUTopology(mesh_shape=shape, device_coordinates=np.reshape(places, (-1, per_task, 4)))


def digest(assignment: DeviceAssignment) -> str:
    return hashlib.sha256(assignment.core_assignment.astype("int32").tobytes()).hexdigest()[:16]


MESH, RING = DeviceOrderMode.MESH, DeviceOrderMode.RING
NAMES = {
    "shape": "computation_shape",
    "stride": "computation_stride",
    "order": "device_order_mode",
}


@pytest.mark.parametrize(
    ("shape", "num_replicas", "options", "num_cores", "wanted"),
    [
        ([2, 2, 1, 2], 8, {}, 1, "f090a4bbc1a3325a"),
        ([2, 2, 1, 2], 4, {}, 1, "161cdd43f4fd4196"),
        ([2, 2, 1, 2], 4, {"shape": [1, 1, 1, 2]}, 2, "35bd8a62391eb3e2"),
        ([2, 2, 1, 2], 4, {"shape": [1, 1, 1, 2], "order": MESH}, 2, "f090a4bbc1a3325a"),
        ([4, 4, 1, 1], 16, {}, 1, "0703a067f4d52143"),
        ([4, 4, 1, 1], 5, {}, 1, "2675fb1551387339"),
        ([4, 4, 1, 1], 4, {"shape": [2, 2, 1, 1], "order": RING}, 4, "7cfe51dd66ce14a5"),
        (
            [4, 4, 1, 1],
            8,
            {"shape": [2, 1, 1, 1], "stride": [2, 1, 1, 1]},
            2,
            "417330c8aa8f0ec8",
        ),
        ([4, 4, 4, 1], 64, {}, 1, "e58df8d14f91e58f"),
        ([4, 4, 4, 1], 8, {"shape": [2, 2, 2, 1]}, 8, "15f0e7ea8480bd0b"),
        ([3, 2, 1, 2], 12, {}, 1, "c1f30905575a9a5d"),
        ([3, 2, 1, 2], 6, {"shape": [1, 1, 1, 2]}, 2, "c1f30905575a9a5d"),
        ([2, 4, 1, 1], 3, {}, 1, "e0a6bf44ed273c37"),
        ([8, 8, 1, 1], 27, {}, 1, "094dedcf9507f3eb"),
    ],
)
def test_replicas_are_laid_out_as_tensorflow_lays_them_out(
    shape, num_replicas, options, num_cores, wanted
) -> None:
    topology = full(shape)
    arguments = {NAMES[name]: value for name, value in options.items()}
    for known in (topology, topology.serialized()):
        assignment = DeviceAssignment.build(known, num_replicas=num_replicas, **arguments)
        assert assignment.num_replicas == num_replicas
        assert assignment.num_cores_per_replica == num_cores
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
    assert topology.missing_devices.tolist() == [[1, 0, 0, 0]]
    assert topology.task_ordinal_at_coordinates([1, 0, 0, 0]) == -1
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
            {"num_replicas": 5, "device_order_mode": RING},
            "as device_order_mode=RING requires",
        ),
    ],
)
def test_what_does_not_fit_is_refused(arguments, message) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        DeviceAssignment.build(full([4, 4, 1, 1]), **arguments)
    with pytest.raises(ValueError, match="topology='v5e' is of type str"):
        DeviceAssignment.build("v5e")
    with pytest.raises(ValueError, match="topology=None is of type NoneType"):
        DeviceAssignment(None, [[[0, 0, 0, 0]]])
    with pytest.raises(ValueError, match=re.escape("core_assignment has shape (1, 4)")):
        DeviceAssignment(full([2, 2, 1, 1]), [[0, 0, 0, 0]])


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


def test_devices_are_found_by_their_place(topology) -> None:
    assert topology.mesh_rank == 4
    assert topology.missing_devices.tolist() == []
    assert topology.task_ordinal_at_coordinates([1, 1, 0, 0]) == 1
    assert topology.tpu_device_ordinal_at_coordinates([1, 1, 0, 1]) == 3
    name = topology.tpu_device_name_at_coordinates([1, 1, 0, 1], job="worker")
    assert name == "/job:worker/task:1/device:TPU:3"
    assert topology.cpu_device_name_at_coordinates([1, 1, 0, 1]) == "/task:1/device:CPU:0"


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


# Exit code of a process whose group breaks while all are about to exit.


@dataclasses.dataclass
class Broken:
    """A group of which a process is lost while this one waits for all to end."""

    is_reported: bool = False
    verdict: object = None

    def leave(self) -> bool:
        return False

    def drain(self, limit_s: float) -> None: ...


@pytest.mark.parametrize(
    ("planned", "is_reported", "code"),
    [
        ([], False, 0),
        ([], True, 1),
        ([42], False, 42),
        ([42], True, 1),
        ([None], False, 0),
        (["a reason in words"], False, 1),
    ],
)
def test_planned_code_is_kept_unless_the_program_saw_the_loss(
    planned, is_reported, code, monkeypatch
) -> None:
    ends: list[int] = []
    monkeypatch.setattr(processes, "_state", processes._ExitState())
    monkeypatch.setattr(processes, "_exit", ends.append)
    monkeypatch.setattr(processes, "current_group", lambda: Broken(is_reported))
    for one in planned:
        processes.expect_exit(one)
    processes._exit_with_group()
    assert ends == [code]


# Serialized TPU topologies. Expected bytes come from TensorFlow 2.21.


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


# Rings through boxes of chips.


def distance(one: tuple[int, int, int], other: tuple[int, int, int]) -> int:
    return sum(abs(a - b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    "sizes",
    [(2, 2, 1), (2, 4, 1), (8, 8, 1), (2, 1, 4), (1, 4, 2), (2, 2, 2), (4, 4, 8), (16, 16, 1)],
)
def test_every_chip_is_adjacent_to_the_next_and_the_last_to_the_first(sizes) -> None:
    ring = ring_of(sizes)
    assert ring[0] == (0, 0, 0)
    assert sorted(ring) == list(itertools.product(*map(range, sizes)))
    assert {distance(ring[i - 1], ring[i]) for i in range(len(ring))} == {1}
    for line in [(1, 1, 1), (3, 1, 1), (1, 4, 1), (1, 1, 5)]:
        assert ring_of(line) == sorted(itertools.product(*map(range, line)))
    assert ring_of((2, 3, 1)) == [(x, y, 0) for y in range(3) for x in range(2)]  # row by row


# Startup of JAX in several processes; most of it is tested by tests/multiprocess.

_PROGRAM = """
import jax
jax.distributed.initialize("127.0.0.1:{port}", 1, 0, coordinator_bind_address="127.0.0.1:{port}")
from stratagem.devices.processes import end_coordination
print(jax.distributed.is_initialized())
end_coordination()
print(jax.distributed.is_initialized())
jax.distributed.initialize("127.0.0.1:{port}", 1, 0, coordinator_bind_address="127.0.0.1:{port}")
jax.devices()
end_coordination()  # too late: the backend has started with it
print(jax.distributed.is_initialized())
"""


def test_coordination_of_a_launcher_ends_before_jax_starts() -> None:
    (port,) = free_ports(1)
    printed = run_fresh(_PROGRAM.format(port=port), JAX_PLATFORMS="cpu")
    assert printed == ["True", "False", "True"]
