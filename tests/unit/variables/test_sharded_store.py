"""Shards of the first axis that divides evenly, and the shards of this process."""

from __future__ import annotations

import numpy as np
import pytest

from stratagem.devices.finding import find_devices, find_groups
from stratagem.devices.mesh import Topology
from stratagem.devices.shards import local_shards, put_local_shards
from stratagem.variables.layouts import Division
from stratagem.variables.sharded_store import ShardedStore


def replicas(count: int) -> Topology:
    return Topology(find_devices([f"cpu:{index}" for index in range(count)]))


def test_parts_are_of_the_first_axis_that_can_be_parted() -> None:
    four = ShardedStore(replicas(4))
    shapes = {(8, 3): 0, (3, 8): 1, (6, 5): None, (): None, (0, 4): 1}
    assert {shape: four.sharded_axis(shape) for shape in shapes} == shapes
    parts = four.put(np.arange(24.0).reshape(3, 8)).addressable_shards
    assert [part.data.shape for part in parts] == [(3, 2)] * 4


@pytest.mark.parametrize("shape", [(8, 3), (3, 8)])
def test_own_parts_make_up_what_is_kept(shape) -> None:
    four = ShardedStore(replicas(4))
    value = np.arange(24.0, dtype="float32").reshape(shape)
    own = local_shards(four.put(value))
    assert own.shape == (4, *(size // 4 if size == 8 else size for size in shape))
    np.testing.assert_array_equal(np.concatenate(own, axis=shape.index(8)), value)
    again = put_local_shards(own, shape, four.sharding(shape))
    assert again.sharding == four.sharding(shape)
    np.testing.assert_array_equal(again, value)


def pairs() -> Topology:
    return Topology.of_groups(find_groups([["cpu:0", "cpu:1"], ["cpu:2", "cpu:3"]]))


@pytest.mark.parametrize(
    ("axes", "replica_axis", "shard"),
    [
        ((("logical",), ()), 1, (2, 4)),  # another axis than the devices of a replica
        (((), ("logical",)), 0, (2, 4)),
        ((("replica",), ("logical",)), 0, (2, 4)),
        (((), ("replica",)), 1, (4, 4)),
        ((("logical",), ("logical",)), None, None),
    ],
)
def test_values_are_sharded_in_two_dimensions(axes, replica_axis, shard) -> None:
    store = ShardedStore(pairs()).divided(Division(axes))
    assert store.sharded_axis((4, 8)) == replica_axis
    assert not store.serves_rows
    if replica_axis is None:
        return
    value = np.arange(32.0, dtype="float32").reshape(4, 8)
    stored = store.put(value)
    assert {part.data.shape for part in stored.addressable_shards} == {shard}
    np.testing.assert_array_equal(store.gather(stored), value)
    own = local_shards(stored)
    assert own.shape == (4, *shard)
    again = put_local_shards(own, value.shape, stored.sharding)
    assert again.sharding == stored.sharding
    np.testing.assert_array_equal(again, value)


def test_axis_of_an_odd_size_is_not_sharded_over_replicas() -> None:
    store = ShardedStore(pairs()).divided(Division((("logical",), ())))
    assert store.sharded_axis((4, 7)) is None
    assert ShardedStore(pairs()).divided(None) == ShardedStore(pairs())
