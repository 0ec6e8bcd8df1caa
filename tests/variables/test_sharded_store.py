"""Shards of the first axis that divides evenly, and the shards of this process."""

from __future__ import annotations

import numpy as np
import pytest

from stratagem.topology import Topology, find_devices
from stratagem.variables import ShardedStore


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
    own = four.local_shards(four.put(value))
    assert own.shape == (4, *(size // 4 if size == 8 else size for size in shape))
    np.testing.assert_array_equal(np.concatenate(own, axis=shape.index(8)), value)
    again = four.from_local_shards(own, shape)
    assert again.sharding == four.sharding(shape)
    np.testing.assert_array_equal(again, value)
