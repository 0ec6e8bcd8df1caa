"""Updates by rows of tables in parts: each device makes its own, and the numbers are the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from stratagem.devices.mesh import REPLICA_AXIS, Topology
from stratagem.execution.embeddings.sharded_row_updates import (
    ShardedRowUpdates,
    rows_to_update,
    with_updated_rows,
)

TOPOLOGY = Topology(tuple(jax.devices()[:2]))
NUM_ROWS = 6
TABLE = jnp.arange(12.0).reshape(NUM_ROWS, 2)
SLOT = TABLE * 0.1 + 1.0
IDS = jnp.array([0, 3, 2, np.iinfo("int32").max], "int32")  # the last stands for no row
GRADIENT = jnp.arange(8.0).reshape(4, 2) - 3.0
INPUTS = (TABLE, SLOT, IDS, GRADIENT)


def adagrad(table, slot, ids, gradient):
    rows, slots = rows_to_update(table, ids), rows_to_update(slot, ids)
    slots = slots + jnp.square(gradient)
    rows = rows - 0.5 * gradient / jnp.sqrt(slots + 1e-7)
    return with_updated_rows(table, ids, rows), with_updated_rows(slot, ids, slots), slot.sum()


def sgd(table, slot, ids, gradient):
    rows = rows_to_update(table, ids)
    return with_updated_rows(table, ids, rows - 0.5 * gradient), slot * 2, gradient.sum()


def by_norm_of_all_rows(table, slot, ids, gradient):
    rows = rows_to_update(table, ids)
    rows = rows - 0.1 * gradient * jnp.linalg.norm(rows)
    return with_updated_rows(table, ids, rows), slot, gradient


def rows_that_leave(table, slot, ids, gradient):
    rows = rows_to_update(table, ids)
    return with_updated_rows(table, ids, rows - gradient), slot, rows


def table_read_again(table, slot, ids, gradient):
    rows = rows_to_update(table, ids)
    table = with_updated_rows(table, ids, rows - gradient)
    return table, slot + table, gradient


UPDATES: dict[Callable[..., Any], bool] = {
    adagrad: True,
    sgd: True,
    by_norm_of_all_rows: False,
    rows_that_leave: False,
    table_read_again: False,
}


def parted(update: Callable[..., Any]) -> ShardedRowUpdates:
    jaxpr = jax.make_jaxpr(update)(*INPUTS).jaxpr
    return ShardedRowUpdates.of(jaxpr, [True, True, False, False], TOPOLOGY)


@pytest.mark.parametrize("update", UPDATES)
def test_numbers_are_those_of_the_update(update) -> None:
    own = parted(update)
    assert any(own.is_own) == UPDATES[update]
    by_rows = NamedSharding(TOPOLOGY.mesh, PartitionSpec(REPLICA_AXIS))
    placed = [jax.device_put(one, by_rows) for one in (TABLE, SLOT)]
    got = jax.jit(lambda *inputs: own.values(inputs))(*placed, IDS, GRADIENT)
    for one, wanted in zip(got, update(*INPUTS), strict=True):
        np.testing.assert_allclose(one, wanted, rtol=1e-6)


@pytest.mark.parametrize("update", [one for one, is_own in UPDATES.items() if is_own])
def test_no_row_is_sent(update) -> None:
    own = parted(update)
    by_rows = NamedSharding(TOPOLOGY.mesh, PartitionSpec(REPLICA_AXIS))
    shapes = [jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=by_rows) for one in INPUTS[:2]]
    shapes += [
        jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=TOPOLOGY.replicated)
        for one in INPUTS[2:]
    ]
    run = jax.jit(lambda *inputs: own.values(inputs)[:2], out_shardings=[by_rows] * 2)
    program = run.lower(*shapes).compile().as_text()
    assert program is not None
    assert "scatter" in program
    for exchange in ("all-reduce", "all-gather", "all-to-all", "collective-permute"):
        assert exchange not in program


def test_tables_that_lie_otherwise_are_left_alone() -> None:
    jaxpr = jax.make_jaxpr(adagrad)(*INPUTS).jaxpr
    own = ShardedRowUpdates.of(jaxpr, [False] * 4, TOPOLOGY)
    assert not any(own.is_own)
    for one, wanted in zip(own.values(INPUTS), adagrad(*INPUTS), strict=True):
        np.testing.assert_allclose(one, wanted, rtol=1e-6)
