"""Where values are kept: one copy on a device, or a part on each; rows of both."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stratagem as sg
from stratagem.topology import Topology, find_devices
from stratagem.variables import ShardedState, ShardedStore, SingleDeviceStore, Store, store_of

HOST = jax.devices()[3]


def replicas(count: int) -> Topology:
    return Topology(find_devices([f"cpu:{index}" for index in range(count)]))


KEEPINGS = {
    "one device, 1": (SingleDeviceStore(HOST), replicas(1)),
    "one device, 2": (SingleDeviceStore(HOST), replicas(2)),
    "replicas, 1": (ShardedStore(replicas(1)), replicas(1)),
    "replicas, 2": (ShardedStore(replicas(2)), replicas(2)),
    "replicas, 4": (ShardedStore(replicas(4)), replicas(4)),
    "pinned, 1": (ShardedStore(replicas(1), memory_kind="pinned_host"), replicas(1)),
    "pinned, 2": (ShardedStore(replicas(2), memory_kind="pinned_host"), replicas(2)),
}


@pytest.fixture(params=KEEPINGS)
def kept_and_topology(request) -> tuple[Store, Topology]:
    return KEEPINGS[request.param]


@pytest.mark.parametrize("shape", [(), (8,), (3, 4), (5, 7), (12, 5)])
def test_what_is_kept_comes_back(kept_and_topology, shape) -> None:
    store, topology = kept_and_topology
    value = np.random.default_rng(0).normal(size=shape).astype("float32")
    for given in (value, jnp.asarray(value), topology.replicate(value)):
        kept = store.put(given)
        assert kept.sharding == store.sharding(shape)
        np.testing.assert_array_equal(kept, value)
        spread = store.replicate(kept, topology)
        assert {shard.device for shard in spread.addressable_shards} == set(topology.devices or ())
        for shard in spread.addressable_shards:
            np.testing.assert_array_equal(shard.data, value)
        whole = store.gather(kept)
        assert len(whole.devices()) == 1
        np.testing.assert_array_equal(whole, value)
        np.testing.assert_array_equal(store.for_step(kept, topology), value)
        for there in (spread, whole, store.for_step(kept, topology), store.load(kept)):
            assert there.sharding.memory_kind == "device"
            assert float(jnp.sum(there[..., None] * 2)) == pytest.approx(2 * value.sum(), rel=1e-3)
        again = store.unload(store.for_step(kept, topology))
        assert again.sharding.memory_kind == kept.sharding.memory_kind
        np.testing.assert_array_equal(again, value)
        np.testing.assert_array_equal(store.for_update(given), value)


@pytest.mark.parametrize("num_rows", [24, 7])
def test_rows_are_those_of_numpy(kept_and_topology, num_rows) -> None:
    store, topology = kept_and_topology
    rng = np.random.default_rng(1)
    table = rng.normal(size=(num_rows, 4)).astype("float32")
    several = (topology.num_replicas,) if topology.num_replicas > 1 else ()
    ids = rng.integers(-num_rows, num_rows, (*several, 3, 2), dtype="int32")
    given = topology.put_stacked(ids) if several else ids
    rows = store.rows(store.load(store.put(table)), given, topology)
    np.testing.assert_array_equal(rows, table[ids])
    if several:
        assert rows.sharding.is_equivalent_to(topology.stacked, rows.ndim)
    ids[..., 0, 0] = num_rows
    ids[..., 1, 1] = -num_rows - 1
    given = topology.put_stacked(ids) if several else ids
    rows = np.asarray(store.rows(store.load(store.put(table)), given, topology))
    np.testing.assert_array_equal(rows, jnp.take(table, ids, axis=0))
    assert np.isnan(rows[..., 0, 0, :]).all()


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


@pytest.mark.parametrize("is_all", [False, True])
def test_state_is_parted_where_it_is_large_and_can_be(is_all) -> None:
    policy = ShardedState(ShardedStore(replicas(2)), is_all=is_all)
    policy.check()
    owner = np.zeros((64, 32))
    assert policy.choose(owner, slot_of=owner) is policy.store
    assert (policy.choose(owner, slot_of=None) is policy.store) == is_all
    for other in (np.zeros((8, 8)), np.zeros((63, 33)), np.zeros(())):
        assert policy.choose(other, slot_of=other) is None


def test_other_variables_are_kept_nowhere() -> None:
    with sg.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        assert store_of(sg.Variable(1.0)) is None
    assert store_of(sg.Variable(1.0)) is None
