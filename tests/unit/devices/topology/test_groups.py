"""Device groups: lookup, validation, division into adjacent groups, and topology."""

from __future__ import annotations

import math

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from stratagem.devices.finding import find_groups
from stratagem.devices.mesh import (
    REPLICA_AXIS,
    Topology,
    adjacent_groups,
    check_groups,
    prime_factors,
)
from stratagem.devices.shards import replicas_span_processes
from stratagem.variables.distributed import PerReplica


class OfProcess:
    """A device of some process, as far as groups ask."""

    def __init__(self, process_index: int, number: int) -> None:
        self.process_index = process_index
        self.number = number

    def __str__(self) -> str:
        return f"device {self.number} of {self.process_index}"


def ids(groups) -> list[list[int]]:
    return [[device.id for device in group] for group in groups]


@pytest.fixture
def two_of_four() -> Topology:
    return Topology.of_groups(
        find_groups([["cpu:4", "cpu:1", "cpu:2", "cpu:3"], ["cpu:0", "cpu:5", "cpu:6", "cpu:7"]])
    )


def by_device(array: jax.Array) -> dict[int, np.ndarray]:
    return {shard.device.id: np.asarray(shard.data) for shard in array.addressable_shards}


def test_groups_are_found_by_name_index_and_device() -> None:
    assert ids(find_groups([["cpu:2", 0], [jax.devices()[5], "/cpu:1"]])) == [[2, 0], [5, 1]]


@pytest.mark.parametrize(
    ("specs", "error", "match"),
    [
        ([["cpu:0", "cpu:1"], ["cpu:2"]], ValueError, "device groups have 2, 1 devices"),
        ([["cpu:0"], []], ValueError, "device groups have 1, 0 devices"),
        ([["cpu:0", "cpu:1"], ["cpu:1", "cpu:2"]], ValueError, "more than once"),
        ([[], []], ValueError, r"devices=\[\] is empty"),
        ([["cpu:0"], "cpu:1"], TypeError, "mixes groups with the single device 'cpu:1'"),
    ],
)
def test_groups_that_cannot_be_are_refused(specs, error, match) -> None:
    with pytest.raises(error, match=match):
        find_groups(specs)


@pytest.mark.parametrize(
    ("groups", "match"),
    [
        ([], "device groups have no devices"),
        ([[0, 1], [1, 2]], r"contain cpu:1 more than once"),
        ([[0, 0]], r"contain cpu:0 more than once"),
    ],
)
def test_groups_of_devices_are_checked(groups, match) -> None:
    with pytest.raises(ValueError, match=match):
        check_groups([[jax.devices()[index] for index in group] for group in groups])


def test_groups_do_not_share_their_processes() -> None:
    with pytest.raises(ValueError, match="device 0 of 0, device 2 of 1 has a part of the devices"):
        check_groups([[OfProcess(index, 2 * index + part) for index in (0, 1)] for part in (0, 1)])
    with pytest.raises(ValueError, match="a multiple of it that divides the 12 devices"):
        adjacent_groups([OfProcess(index // 4, index) for index in range(12)], 6)


@pytest.mark.parametrize("size", [4, 8])
def test_group_may_have_several_processes(size) -> None:
    groups = adjacent_groups([OfProcess(index // 2, index) for index in range(8)], size)
    assert [[d.number for d in group] for group in groups] == [
        [*range(start, start + size)] for start in range(0, 8, size)
    ]
    topology = Topology.of_groups(groups)
    assert topology.spans_processes
    assert replicas_span_processes(topology)
    count = size // 2
    assert topology.processes_of_inputs == tuple(
        tuple(range(first, first + count)) for first in range(0, 4, count)
    )
    assert topology.local_replica_ids == (0,)  # of process 0
    assert [d.number for d in topology.local_devices] == [0]


def test_processes_feed_their_own_replicas(two_of_four) -> None:
    assert two_of_four.processes_of_inputs == ((0,),)
    assert not replicas_span_processes(two_of_four)
    topology = Topology.of_groups([[OfProcess(index, index)] for index in range(3)])
    assert topology.processes_of_inputs == ((0,), (1,), (2,))
    assert not replicas_span_processes(topology)


def test_neighbours_of_each_process_form_groups() -> None:
    devices = [OfProcess(index // 4, index) for index in range(8)]
    groups = adjacent_groups(devices, 2)
    assert [[d.number for d in group] for group in groups] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    with pytest.raises(
        ValueError, match="devices_per_replica=3 does not divide the 4 devices of each process"
    ):
        adjacent_groups(devices, 3)
    with pytest.raises(ValueError, match="devices_per_replica=16 does not divide the 4"):
        adjacent_groups(devices, 16)
    with pytest.raises(ValueError, match="devices_per_replica=0"):
        adjacent_groups(devices, 0)
    with pytest.raises(TypeError, match="devices_per_replica='2' is of type str"):
        adjacent_groups(devices, "2")


@pytest.mark.parametrize("number", [1, 2, 3, 4, 6, 8, 12, 97, 256])
def test_prime_factors_make_the_number(number) -> None:
    factors = prime_factors(number)
    assert math.prod(factors) == number
    assert all(factor % d for factor in factors for d in range(2, factor))
    assert list(factors) == sorted(factors)


def test_mesh_has_an_axis_for_each_factor_of_a_group(two_of_four) -> None:
    assert two_of_four.num_replicas == 2
    assert two_of_four.num_logical_devices == 4
    assert two_of_four.mesh.axis_names == (REPLICA_AXIS, "logical_0", "logical_1")
    assert two_of_four.mesh.devices.shape == (2, 2, 2)
    assert [d.id for d in two_of_four.mesh.devices.ravel()] == [4, 1, 2, 3, 0, 5, 6, 7]
    pair = Topology.of_groups(find_groups([["cpu:0", "cpu:1"]]))
    assert pair.mesh.axis_names == (REPLICA_AXIS, "logical")
    assert pair.mesh.devices.shape == (1, 2)


def test_first_device_of_a_group_stands_for_its_replica(two_of_four) -> None:
    assert ids([two_of_four.devices, two_of_four.local_devices]) == [[4, 0], [4, 0]]
    assert ids([two_of_four.all_devices]) == [[4, 1, 2, 3, 0, 5, 6, 7]]
    assert ids([two_of_four.devices_of(1)]) == [[0, 5, 6, 7]]
    assert not two_of_four.spans_processes


def test_groups_of_one_device_are_a_topology_of_devices() -> None:
    single = Topology.of_groups(find_groups([["cpu:1"], ["cpu:0"]]))
    assert single == Topology(tuple(jax.devices()[index] for index in (1, 0)))
    assert single.devices_of(1) == (jax.devices()[0],)
    assert single.num_logical_devices == 1
    assert single.logical_axes == ()
    assert Topology(None).devices_of(0) == ()
    assert Topology(None).all_devices is None


def test_replicate_puts_a_copy_on_every_device_of_every_group(two_of_four) -> None:
    copies = by_device(two_of_four.replicate(np.arange(3)))
    assert set(copies) == set(range(8))
    assert all(copy.tolist() == [0, 1, 2] for copy in copies.values())


@pytest.mark.parametrize("method", ["stack", "put_stacked"])
def test_component_is_on_every_device_of_its_group(two_of_four, method) -> None:
    values = [np.array([1.0, 2.0]), np.array([3.0, 4.0])]
    stacked = getattr(two_of_four, method)(values if method == "stack" else np.stack(values))
    assert stacked.sharding.spec == PartitionSpec(REPLICA_AXIS)
    parts = by_device(stacked)
    for device in (4, 1, 2, 3):
        assert parts[device].tolist() == [[1.0, 2.0]]
    for device in (0, 5, 6, 7):
        assert parts[device].tolist() == [[3.0, 4.0]]


def test_parts_of_a_value_are_those_on_the_first_devices(two_of_four) -> None:
    value = PerReplica(stacked=two_of_four.stack([np.ones(2), np.zeros(2)]))
    assert [part.tolist() for part in value.components] == [[1, 1], [0, 0]]
    assert [part.devices() for part in value.components] == [
        {jax.devices()[4]},
        {jax.devices()[0]},
    ]
