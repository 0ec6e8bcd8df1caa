"""Topology: mesh, shardings, and transfer of arrays."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from stratagem.devices.finding import find_devices
from stratagem.devices.mesh import REPLICA_AXIS, Topology


@pytest.fixture
def three() -> Topology:
    """Replicas on the devices 2, 0 and 1, so that replica order is not JAX's order."""
    return Topology(find_devices(["cpu:2", "cpu:0", "cpu:1"]))


def by_device(array: jax.Array) -> dict[int, np.ndarray]:
    return {shard.device.id: np.asarray(shard.data) for shard in array.addressable_shards}


def test_mesh_has_the_devices_in_replica_order_on_one_axis(three) -> None:
    assert three.num_replicas == 3
    assert three.mesh.axis_names == (REPLICA_AXIS,)
    assert [device.id for device in three.mesh.devices] == [2, 0, 1]


def test_default_topology_is_one_replica_on_the_default_device() -> None:
    topology = Topology(None)
    assert topology.num_replicas == 1
    assert list(topology.mesh.devices) == jax.local_devices()[:1]


def test_shardings_say_on_which_axis_the_replicas_are(three) -> None:
    specs = [three.replicated.spec, three.stacked.spec, three.stacked_steps.spec]
    assert specs == [
        PartitionSpec(),
        PartitionSpec(REPLICA_AXIS),
        PartitionSpec(None, REPLICA_AXIS),
    ]
    steps = jax.device_put(np.arange(6).reshape(2, 3), three.stacked_steps)
    columns = {device: part[:, 0].tolist() for device, part in by_device(steps).items()}
    assert columns == {2: [0, 3], 0: [1, 4], 1: [2, 5]}


@pytest.mark.parametrize("value", [1.5, np.arange(4, dtype=np.int32), np.zeros((0, 2), bool)])
def test_replicate_puts_a_whole_copy_on_every_device(three, value) -> None:
    copies = by_device(three.replicate(value))
    assert set(copies) == {0, 1, 2}
    for copy in copies.values():
        np.testing.assert_array_equal(copy, value)


def test_replicate_on_the_default_topology_makes_an_ordinary_array() -> None:
    array = Topology(None).replicate(np.float32(2.5))
    assert float(array) == 2.5
    assert array.devices() == {jax.local_devices()[0]}


def test_stack_puts_component_i_on_device_i(three) -> None:
    values = [np.full((2,), index, np.float32) for index in range(3)]
    stacked = three.stack(values)
    np.testing.assert_array_equal(stacked, [[0, 0], [1, 1], [2, 2]])
    parts = {device: part.tolist() for device, part in by_device(stacked).items()}
    assert parts == {2: [[0, 0]], 0: [[1, 1]], 1: [[2, 2]]}


def test_stack_on_the_default_topology_takes_components_from_different_devices() -> None:
    values = [jax.device_put(np.float32(index), jax.devices()[index]) for index in range(3)]
    np.testing.assert_array_equal(Topology(None).stack(values), [0, 1, 2])


def test_stack_takes_random_keys(three) -> None:
    keys = [jax.random.key(index) for index in range(3)]
    stacked = three.stack(keys)
    for key, part in zip(keys, stacked, strict=True):
        np.testing.assert_array_equal(jax.random.key_data(part), jax.random.key_data(key))


@pytest.mark.parametrize("is_default", [True, False])
def test_stack_takes_traced_components(three, is_default) -> None:
    topology = Topology(None) if is_default else three
    stacked = jax.jit(lambda x: topology.stack([x, 2 * x, np.float32(0)]))(np.float32(3.0))
    np.testing.assert_array_equal(stacked, [3, 6, 0])


@pytest.mark.parametrize("is_default", [True, False])
def test_stack_joins_known_components_while_something_else_is_traced(three, is_default) -> None:
    topology = Topology(None) if is_default else three
    kept = []

    @jax.jit
    def traced(x):
        kept.append(topology.stack([np.float32(1), 2.0, np.float32(3)]))
        return x + kept[0].sum()

    assert float(traced(np.float32(10.0))) == 16.0
    np.testing.assert_array_equal(kept[0], [1, 2, 3])


@pytest.mark.parametrize("count", [0, 2, 4])
def test_stack_of_another_number_of_components_is_refused(three, count) -> None:
    with pytest.raises(ValueError, match=f"Received {count} values for 3 replicas"):
        three.stack([np.float32(0.0)] * count)


def test_devices_that_are_no_tuple_are_refused() -> None:
    with pytest.raises(TypeError, match=r"is of type list(?s:.)*a tuple of jax.Device, or None"):
        Topology(jax.devices())


def test_empty_devices_are_refused() -> None:
    with pytest.raises(ValueError, match=r"devices=\(\) is empty"):
        Topology(())


def test_platform_is_that_of_the_devices() -> None:
    assert Topology(None).platform == Topology(tuple(jax.local_devices()[:2])).platform == "cpu"


def test_replicas_with_several_copies_of_state_are_on_two_axes() -> None:
    devices = tuple(jax.devices()[:6])
    topology = Topology(devices).with_shard_size(3)
    assert topology.mesh.shape == {"replica": 2, "shard": 3}
    assert topology.replica_axis == topology.replica_axes == ("replica", "shard")
    assert (topology.shard_axis, topology.num_shards, topology.num_replicas) == ("shard", 3, 6)
    assert [*topology.mesh.devices.flat] == [*devices]
    stacked = topology.put_stacked(np.arange(6))
    assert [int(one.data[0]) for one in stacked.addressable_shards] == [*range(6)]
    pairs = Topology.of_groups([devices[:2], devices[2:4], devices[4:]]).with_shard_size(1)
    assert pairs.mesh.shape == {"replica": 3, "shard": 1, "logical": 2}


def test_one_copy_of_state_needs_no_second_axis(three) -> None:
    assert three.with_shard_size(3) == three.with_shard_size(None) == three
    assert (three.replica_axis, three.shard_axis, three.num_shards) == ("replica", "replica", 3)
    with pytest.raises(ValueError, match=r"shard_size=2 was given for 3 replicas.\n.*\[1, 3\]"):
        three.with_shard_size(2)
