"""Which rows an index needs: compared with NumPy, which has the whole array."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import stratagem as sg
from stratagem.devices.finding import find_devices, find_groups
from stratagem.devices.mesh import REPLICA_AXIS, Topology
from stratagem.devices.shards import local_shards, put_local_shards
from stratagem.variables import placement as row_exchange
from stratagem.variables.layouts import Division, Store, is_compressed
from stratagem.variables.placement import ShardedStore, SingleDeviceStore, exchanged_rows
from stratagem.variables.sharded_variable import (
    as_slice,
    changed_rows,
    local_rows,
    select_rows,
    sets_rows,
)
from tests.unit.variables.row_methods import CHANGES

VALUES = np.arange(60).reshape(10, 3, 2)
MASK = VALUES[:, 0, 0] % 4 == 0
INDICES = [
    np.s_[2:9:3],
    np.s_[::-1],
    np.s_[8:1:-3],
    np.s_[-20:20],
    np.s_[5:5],
    np.s_[3:1],
    np.s_[5],
    np.s_[-1],
    np.s_[np.int32(4)],
    np.s_[()],
    np.s_[...],
    np.s_[..., 1],
    np.s_[2, ..., 1],
    np.s_[..., 4, 1, 0],
    np.s_[4, 1, 0, ...],
    np.s_[None, 3],
    np.s_[None, 2:4, None, 1],
    np.s_[:, 1],
    np.s_[[1, 1, -1]],
    np.s_[[[1, 2], [3, -10]]],
    np.s_[np.array([3, 1], "uint8"), [0, 2]],
    np.s_[[1, 5], :, [0, 1]],
    np.s_[1, :, [0, 1]],
    np.s_[2:8, [0, 2], 1],
    np.s_[[]],
    np.s_[MASK],
    np.s_[MASK.tolist()],
    np.s_[np.zeros(10, bool)],
    np.s_[VALUES[..., 0] > 20],
    np.s_[VALUES > 41],
    np.s_[MASK, 1],
    np.s_[True],
    np.s_[None, True, 2:3],
]


@pytest.mark.parametrize("index", INDICES, ids=range(len(INDICES)))
def test_index_in_the_selected_rows_is_that_in_the_whole(index) -> None:
    expected = VALUES[index]
    selected = select_rows(index, VALUES.shape, name="v")
    rows = VALUES if selected.rows is None else VALUES[np.asarray(selected.rows, int)]
    np.testing.assert_array_equal(rows[selected.index], expected)
    np.testing.assert_array_equal(jnp.asarray(rows)[selected.index], expected)


@pytest.mark.parametrize(
    ("index", "rows"),
    [
        (np.s_[2:9:3, 1], [2, 5, 8]),
        (np.s_[8:1:-3], [8, 5, 2]),
        (-1, [9]),
        ([7, 7, -1, 2], [2, 7, 9]),
        (VALUES[..., 0] > 50, [8, 9]),
        (np.s_[..., 4, 1, 0], [4]),
        (np.s_[5:5], []),
        *[(index, None) for index in (np.s_[:], np.s_[:, 0], np.s_[...], np.s_[..., 1])],
    ],
)
def test_only_rows_that_are_needed_are_selected(index, rows) -> None:
    selected = select_rows(index, VALUES.shape, name="v").rows
    assert (None if selected is None else list(selected)) == rows  # all are none in particular


def test_arrays_of_jax_and_variables_are_indices() -> None:
    for index in (jnp.array([3, 1]), keras.Variable([3, 1], dtype="int32")):
        selected = select_rows(index, VALUES.shape, name="v")
        np.testing.assert_array_equal(VALUES[selected.rows][selected.index], VALUES[[3, 1]])
    assert select_rows(jnp.array(4), VALUES.shape, name="v").rows == range(4, 5)
    assert select_rows(slice(jnp.array(4), None), VALUES.shape, name="v").rows == range(4, 10)


@pytest.mark.parametrize(
    "make",
    [
        lambda i: i,
        lambda i: (i, 1),
        lambda i: (1, i),
        lambda i: slice(i, None),
        lambda i: slice(None, i),
        lambda i: slice(None, None, i),
        lambda i: [1, i],
        lambda i: jnp.stack([i, i]),
    ],
    ids=["alone", "first", "second", "start", "stop", "step", "list", "array"],
)
def test_traced_index_is_refused(make) -> None:
    def index(i: Any) -> Any:
        return select_rows(make(i), VALUES.shape, name="weights")

    with pytest.raises(TypeError, match=r"'weights' was indexed by the traced value"):
        jax.jit(index)(1)


@pytest.mark.parametrize(
    "index",
    [
        10,
        -11,
        np.s_[0, 3],
        np.s_[2:4, 0, 2],
        [0, 10],
        np.s_[0, 0, 0, 0],
        MASK[:9],
        1.5,
        np.s_[..., ...],
    ],
)
def test_index_that_is_out_of_range_or_none_is_refused(index) -> None:
    with pytest.raises(IndexError):
        VALUES[index]
    with pytest.raises(IndexError, match=r"an index within shape \(10, 3, 2\)"):
        select_rows(index, VALUES.shape, name="v")
    for zero in (np.s_[::0], np.s_[1, ::0]):
        with pytest.raises(ValueError, match="a step other than 0"):
            select_rows(zero, VALUES.shape, name="v")


@pytest.mark.parametrize(
    "rows",
    [range(10), range(2, 9, 3), range(9, -1, -1), range(8, 0, -3), range(4, 4), range(7, 8)],
    ids=repr,
)
def test_range_goes_to_its_shards_and_comes_back(rows) -> None:
    parts = local_rows(rows, [3, 3, 4])
    shards = np.split(VALUES, [3, 6])
    found = [shard[as_slice(part)] for shard, part in zip(shards, parts, strict=True)]
    joined = np.concatenate(found)
    np.testing.assert_array_equal(
        joined[::-1] if rows.step < 0 else joined, VALUES[np.asarray(rows, int)]
    )
    of_numbers = local_rows(np.array([0, 3, 5, 9]), [3, 3, 4])
    assert [list(part) for part in of_numbers] == [[0], [0, 2], [3]]


# Stores of one copy on a device, and of a shard on each: values and rows.

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


@pytest.mark.parametrize("shape", [(), (5, 7), pytest.param((3, 4), marks=pytest.mark.slow)])
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


# Rows that replicas look up in a sharded table: the same as from the whole, in bounded memory.

WIDTH = 4


def exchanged(table: np.ndarray, ids: np.ndarray) -> jax.Array:
    topology = replicas(len(ids))
    by_rows = NamedSharding(topology.mesh, PartitionSpec(REPLICA_AXIS))
    return exchanged_rows(topology, *(jax.device_put(one, by_rows) for one in (table, ids)))


def table_of(num_rows: int, dtype: str = "float32") -> np.ndarray:
    return (np.arange(num_rows * WIDTH).reshape(num_rows, WIDTH) + 1).astype(dtype)


@pytest.fixture(params=[row_exchange._MIN_BLOCK_BYTES, 1], ids=["one message", "blocks"])
def block_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_exchange, "_MIN_BLOCK_BYTES", request.param)
    exchanged_rows.clear_cache()


@pytest.mark.usefixtures("block_bytes")
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((4, 1), "float32"), ((4, 3, 5), "float32"), ((2, 11), "float32"), ((2, 2, 3, 2), "int32")],
)
def test_rows_are_those_of_the_whole_table(shape: tuple[int, ...], dtype: str) -> None:
    table = table_of(12, dtype)
    ids = np.random.default_rng(0).integers(-16, 16, shape).astype("int32")
    np.testing.assert_array_equal(exchanged(table, ids), jnp.take(table, ids, axis=0))
    for row in (0, -1, 11, 12, -13, np.iinfo("int32").max):  # which all replicas want
        ids = np.full((4, 9), row, "int32")
        np.testing.assert_array_equal(exchanged(table, ids), jnp.take(table, ids, axis=0))
    if dtype == "float32":
        table[3], table[5] = np.nan, np.inf  # which stay with their ids
        ids = np.arange(32, dtype="int32").reshape(4, 8) % 12
        np.testing.assert_array_equal(exchanged(table, ids), table[ids])


@pytest.mark.parametrize(("num_rows", "num_ids"), [(2**15, 2**15), (2**17, 2**15), (2**12, 2**15)])
def test_temporary_memory_is_that_of_the_rows_or_of_a_shard(
    num_rows: int, num_ids: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_exchange, "_MIN_BLOCK_BYTES", 1)
    exchanged_rows.clear_cache()
    topology, row_bytes = replicas(8), 64 * 4
    by_rows = NamedSharding(topology.mesh, PartitionSpec(REPLICA_AXIS))
    program = exchanged_rows.lower(
        topology,
        jax.ShapeDtypeStruct((num_rows, 64), "float32", sharding=by_rows),
        jax.ShapeDtypeStruct((8, num_ids), "int32", sharding=by_rows),
    ).compile()
    own_bytes, shard_bytes = num_ids * row_bytes, num_rows // 8 * row_bytes
    # Without blocks, the rows of all replicas are 8 * own_bytes.
    block_bytes = max(own_bytes, shard_bytes)
    assert program.memory_analysis().temp_size_in_bytes < block_bytes + 3 * own_bytes


# Shards of the first axis that divides evenly, and the shards of this process.


@pytest.mark.parametrize("shape", [(8, 3), (3, 8)])
def test_own_parts_make_up_what_is_kept(shape) -> None:
    four = ShardedStore(replicas(4))
    value = np.arange(24.0, dtype="float32").reshape(shape)
    shapes = {(8, 3): 0, (3, 8): 1, (6, 5): None, (): None, (0, 4): 1}
    assert {shape: four.sharded_axis(shape) for shape in shapes} == shapes  # the first that can be
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


# Arrays some rows of which are changed: compared with NumPy.

START = np.arange(1.0, 9, dtype="float32").reshape(4, 2)
ROWS = np.array([[10.0, -10.0], [0.5, 3.0], [4.0, 2.0]], "float32")


@pytest.mark.parametrize(
    ("method", "change"),
    CHANGES,
)
def test_rows_change_as_numpy_changes_them(method, change) -> None:
    indices = np.array([3, 0, 9])  # of which the last is past the end
    expected = START.copy()
    expected[[3, 0]] = change(START[[3, 0]], ROWS[:2])
    got = changed_rows(method, START, sg.IndexedSlices(ROWS, indices))
    np.testing.assert_allclose(got, expected, rtol=1e-6)
    assert sets_rows(method) == (method in ("scatter_min", "scatter_max", "scatter_update"))
    whole = changed_rows(
        method, np.ones(2, "int32"), sg.IndexedSlices(np.array([2.0]), np.array([1]))
    )
    assert method == "scatter_div" or whole.dtype == np.int32


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("scatter_add", 1 + 2 + 5),
        ("scatter_mul", 1 * (2 + 5)),
        ("scatter_min", 1),
        ("scatter_max", 5),
    ],
)
def test_rows_of_equal_index_are_added_up_or_all_count(method, expected) -> None:
    slices = sg.IndexedSlices(jnp.array([2.0, 5.0]), jnp.array([0, 0]))
    assert float(changed_rows(method, np.ones(1, "float32"), slices)[0]) == expected


# Choice of the variables whose gradients are sent compressed.

INT8 = sg.compression.Int8()


@pytest.mark.parametrize(
    ("shape", "dtype", "expected"),
    [
        ((64, 64), "float32", True),
        ((64, 64), "bfloat16", True),
        ((3, 3, 16, 32), "float32", True),
        ((64, 64), "int32", False),
        ((4096,), "float32", False),
        ((8, 8), "float32", False),
    ],
)
def test_large_float_matrices_are_compressed(shape, dtype, expected) -> None:
    with sg.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        variable = sg.Variable(np.zeros(shape), dtype=dtype)
    assert is_compressed(variable, INT8) is expected
    assert not is_compressed(variable, None)
    with sg.CentralStorageStrategy(["cpu:0", "cpu:1"]).scope():
        central = sg.Variable(np.zeros((64, 64), "float32"))
    with sg.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        table = keras.layers.Embedding(70_000, 2)  # is sent as rows
        table.build()
    assert not is_compressed(central, INT8)
    assert not is_compressed(table.embeddings, INT8)
