"""Rows that replicas look up in a sharded table: the same as from the whole, in bounded memory."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from stratagem.devices.finding import find_devices
from stratagem.devices.mesh import REPLICA_AXIS, Topology
from stratagem.variables import sharded_store as row_exchange
from stratagem.variables.sharded_store import exchanged_rows

WIDTH = 4


@functools.cache
def replicas(count: int) -> Topology:
    return Topology(find_devices([f"cpu:{index}" for index in range(count)]))


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
@pytest.mark.parametrize("shape", [(4, 1), (4, 7), (4, 3, 5), (2, 11), (2, 2, 3, 2)])
@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_rows_are_those_of_the_whole_table(shape: tuple[int, ...], dtype: str) -> None:
    table = table_of(12, dtype)
    ids = np.random.default_rng(0).integers(-16, 16, shape).astype("int32")
    np.testing.assert_array_equal(exchanged(table, ids), jnp.take(table, ids, axis=0))


@pytest.mark.usefixtures("block_bytes")
@pytest.mark.parametrize("row", [0, -1, 7, 8, -9, np.iinfo("int32").max])
def test_all_replicas_may_want_the_same_row(row: int) -> None:
    table, ids = table_of(8), np.full((4, 9), row, "int32")
    np.testing.assert_array_equal(exchanged(table, ids), jnp.take(table, ids, axis=0))


@pytest.mark.usefixtures("block_bytes")
def test_rows_that_are_no_numbers_stay_with_their_ids() -> None:
    table = table_of(8)
    table[3], table[5] = np.nan, np.inf
    ids = np.arange(32, dtype="int32").reshape(4, 8) % 8
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
