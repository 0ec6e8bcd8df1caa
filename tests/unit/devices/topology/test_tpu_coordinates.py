"""Coordinates of JAX devices, and the order in which they become replicas."""

from __future__ import annotations

import dataclasses

import jax
import pytest
from jax.experimental import mesh_utils

from stratagem.devices.device_assignment import (
    DeviceAssignment,
    assigned_devices,
    in_ring_order,
    num_slices,
    slice_of,
    tpu_topology_of,
)


@dataclasses.dataclass(frozen=True)
class Chip:
    """A fake TPU device, with its coordinates."""

    id: int
    coords: tuple[int, int, int]
    process_index: int = 0
    slice_index: int = 0
    core_on_chip: int = 0
    platform: str = "tpu"
    device_kind: str = "TPU v5 lite"


def chips(width: int, height: int, *, rows_a_host: int, slice_index: int = 0) -> list[Chip]:
    """A slice of a TPU v5e: each host has some of its rows."""
    hosts = height // rows_a_host
    return [
        Chip(x + width * y, (x, y, 0), slice_index * hosts + y // rows_a_host, slice_index)
        for y in range(height)
        for x in range(width)
    ]


def test_chips_are_where_they_say() -> None:
    topology = tpu_topology_of(chips(2, 4, rows_a_host=2))
    assert topology.mesh_shape.tolist() == [2, 4, 1, 1]
    assert (topology.num_tasks, topology.num_tpus_per_task) == (2, 4)
    assert topology.device_coordinates[1].tolist() == [
        [0, 2, 0, 0],
        [1, 2, 0, 0],
        [0, 3, 0, 0],
        [1, 3, 0, 0],
    ]


def test_slices_stand_one_behind_the_other() -> None:
    both = [chip for n in (0, 1) for chip in chips(2, 2, rows_a_host=2, slice_index=n)]
    assert [slice_of(chip) for chip in both] == [0] * 4 + [1] * 4
    assert num_slices(both) == 2
    topology = tpu_topology_of(both)
    assert topology.mesh_shape.tolist() == [2, 2, 2, 1]
    assert topology.device_coordinates[1, :, 2].tolist() == [1] * 4


def test_other_devices_stand_for_chips_in_two_columns() -> None:
    assert num_slices(jax.devices()) == num_slices(None) == 1
    topology = tpu_topology_of(jax.devices()[:6])
    assert topology.mesh_shape.tolist() == [2, 3, 1, 1]
    assert topology.device_coordinates[0, 3].tolist() == [1, 1, 0, 0]
    assert tpu_topology_of(jax.devices()[:3]).mesh_shape.tolist() == [1, 3, 1, 1]


def test_ring_of_a_host_is_that_of_jax() -> None:
    host = chips(4, 2, rows_a_host=2)
    of_jax = mesh_utils.create_device_mesh((8,), host).tolist()
    assert in_ring_order(host) == tuple(of_jax)


def test_hosts_keep_their_places() -> None:
    two = chips(2, 4, rows_a_host=2)
    ring = in_ring_order(two)
    assert [chip.process_index for chip in ring] == [0] * 4 + [1] * 4
    assert [chip.id for chip in ring] == [0, 1, 3, 2, 4, 5, 7, 6]


def test_chips_that_fill_no_box_keep_their_order() -> None:
    some = chips(2, 4, rows_a_host=4)[:5]
    assert in_ring_order(some) == tuple(some)


def test_replicas_get_the_devices_of_their_places() -> None:
    devices = jax.devices()[:4]
    topology = tpu_topology_of(devices)
    assignment = DeviceAssignment(topology, [[[1, 1, 0, 0]], [[0, 0, 0, 0]]])
    assert assigned_devices(assignment, devices) == [(devices[3],), (devices[0],)]


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ([[[1, 3, 0, 0]]], r"uses the coordinates \(1, 3, 0, 0\) of a TPU of shape \[2, 4, 1, 1\]"),
        ([[[0, 0, 0, 0]], [[0, 0, 0, 0]]], r"uses the coordinates \(0, 0, 0, 0\) 2 times"),
    ],
)
def test_places_that_are_not_there_or_taken_twice_are_refused(places, message) -> None:
    assignment = DeviceAssignment(tpu_topology_of(jax.devices()[:8]), places)
    with pytest.raises(ValueError, match=message):
        assigned_devices(assignment, jax.devices()[:4])
