"""Stores of one copy on a device, and of a shard on each: values and rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stratagem.devices.finding import find_devices
from stratagem.devices.mesh import Topology
from stratagem.variables.sharded_store import ShardedStore, SingleDeviceStore
from stratagem.variables.store import Store

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


@pytest.mark.parametrize(
    "shape",
    [
        (),
        (5, 7),
        *(pytest.param(shape, marks=pytest.mark.slow) for shape in [(8,), (3, 4), (12, 5)]),
    ],
)
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
