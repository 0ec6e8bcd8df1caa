"""Gradients of tables that rows are looked up in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import stratagem as sg
from stratagem.devices.mesh import REPLICA_AXIS, Topology
from stratagem.execution.lookups import (
    ShardedRowUpdates,
    rows_pay,
    rows_to_update,
    with_updated_rows,
)

SHAPE = (40_000, 2)  # large enough for rows to pay
IDS = np.array([[3, 7, 3], [39_999, 7, 0]])


def table(strategy: sg.Strategy, seed: int = 0) -> Any:
    values = np.random.default_rng(seed).normal(size=SHAPE).astype("float32")
    with strategy.scope():
        return sg.Variable(values)


def gradient(strategy: sg.Strategy, loss: Callable[[Any, Any], Any], v: Any, **kwargs: Any) -> Any:
    """The gradients of both replicas, each with its own ids."""
    ids = strategy.distribute_values_from_function(
        lambda context: jnp.asarray(IDS[context.replica_id_in_sync_group])
    )

    def step(own):
        return sg.value_and_grad(lambda: loss(v, own), [v], **kwargs)[1][0]

    sg.nn.embedding_lookup(v, 0)  # as building a layer would, it makes the table known
    return strategy.run(step, args=(ids,))


def squares(v: Any, ids: Any) -> Any:
    return jnp.sum(jnp.square(sg.nn.embedding_lookup(v, ids)))


def expected(v: Any, ids: np.ndarray) -> np.ndarray:
    """The gradient of `squares`, by the definition."""
    result = np.zeros(SHAPE, "float32")
    for index in ids:
        result[index] += 2 * np.asarray(v.value)[index]
    return result


@pytest.mark.parametrize("sparse", [False, True])
def test_gradient_is_that_of_the_whole_table(pair, execution, sparse) -> None:
    v = table(pair)
    gradients = gradient(pair, squares, v, sparse_gradients=sparse)
    for replica in (0, 1):
        own = sg.select_replica(replica, gradients)
        assert isinstance(own, sg.IndexedSlices) == sparse
        if sparse:
            assert own.indices.tolist() == IDS[replica].tolist()
            assert own.values.shape == (3, 2)
        np.testing.assert_allclose(jnp.asarray(own), expected(v, IDS[replica]), rtol=1e-6)


def _read_as_well(v: Any, ids: Any) -> Any:
    return squares(v, ids) + 0.5 * jnp.sum(jnp.square(v.value))


def _scanned(v: Any, ids: Any) -> Any:
    return jax.lax.scan(lambda total, one: (total + squares(v, one), None), 0.0, ids)[0]


def _rematerialised(v: Any, ids: Any) -> Any:
    return jax.checkpoint(lambda one: squares(v, one))(ids)


@pytest.mark.parametrize("loss", [_read_as_well, _scanned, _rematerialised])
def test_what_is_more_than_a_lookup_has_a_whole_gradient(pair, loss) -> None:
    v = table(pair)
    gradients = gradient(pair, loss, v, sparse_gradients=True)
    for replica in (0, 1):
        own = sg.select_replica(replica, gradients)
        assert isinstance(own, jax.Array)
        whole = np.asarray(v.value) if loss is _read_as_well else 0.0
        np.testing.assert_allclose(own, expected(v, IDS[replica]) + whole, rtol=1e-5)


def test_lookups_of_several_shapes_and_tables(pair) -> None:
    first, second = table(pair), table(pair, seed=1)
    ids = jnp.array([[5, 6], [5, 8]])

    def loss():
        one = sg.nn.embedding_lookup(first, ids)
        two = sg.nn.embedding_lookup(second, ids[0])
        again = sg.nn.embedding_lookup(first, ids[1, 1])
        return jnp.sum(one * one) + 3 * jnp.sum(two) + jnp.sum(again)

    for v in (first, second):
        sg.nn.embedding_lookup(v, 0)
    grads = pair.run(lambda: sg.value_and_grad(loss, [first, second], sparse_gradients=True)[1])
    one, two = sg.select_replica(0, grads)
    assert one.indices.tolist() == [5, 6, 5, 8, 8]
    assert two.indices.tolist() == [5, 6]
    whole = expected(first, np.array([5, 6, 5, 8]))
    whole[8] += 1
    np.testing.assert_allclose(one.to_dense(), whole, rtol=1e-6)
    np.testing.assert_allclose(two.values, np.full((2, 2), 3.0))


def test_a_function_that_does_something_else_each_time_is_still_right(pair) -> None:
    v = table(pair)
    calls: list[int] = []

    def loss(v, ids):
        calls.append(len(calls))
        return squares(v, ids if len(calls) % 2 else ids[:2]) * 1.0

    gradients = gradient(pair, loss, v)
    assert len(calls) == 3
    np.testing.assert_allclose(sg.select_replica(0, gradients), expected(v, IDS[0]), rtol=1e-6)


def test_rows_pay_in_large_tables_with_few_rows_and_company(pair) -> None:
    large, small = table(pair), sg.Variable(np.zeros((100, 2), "float32"))
    chosen: list[bool] = []

    def step():
        chosen.append(rows_pay(large, [(9_999, 2)]))
        chosen.append(rows_pay(large, [(9_000, 2), (1_000, 2)]))
        chosen.append(rows_pay(small, [(1, 2)]))

    pair.run(step)
    assert chosen == [True, False, False]


def test_ids_and_tables_that_are_none_are_refused() -> None:
    with pytest.raises(TypeError, match="ids of dtype float32"):
        sg.nn.embedding_lookup(jnp.ones((2, 2)), jnp.ones(2))
    with pytest.raises(ValueError, match="received a scalar instead of a table"):
        sg.nn.embedding_lookup(jnp.ones(()), jnp.zeros(2, int))
    np.testing.assert_array_equal(
        sg.nn.embedding_lookup(jnp.arange(4.0).reshape(2, 2), [1]), [[2.0, 3.0]]
    )


def test_rows_of_a_value_that_was_assigned_are_not_those_of_the_table(pair) -> None:
    v = table(pair)
    with pair.scope():
        count = sg.Variable(0.0, trainable=False, aggregation="sum")

    def loss(v, ids):
        v.assign(jnp.ones(SHAPE))
        count.assign_add(jnp.ones(()))
        return squares(v, ids)

    gradients = gradient(pair, loss, v, sparse_gradients=True)
    assert not np.any(np.asarray(sg.select_replica(0, gradients)))
    assert float(count.value) == 2.0  # once on each replica


# Updates by rows of tables in parts: each device makes its own, and the numbers are the same.

TOPOLOGY = Topology(tuple(jax.devices()[:2]))
NUM_ROWS = 6
TABLE = jnp.arange(12.0).reshape(NUM_ROWS, 2)
SLOT = TABLE * 0.1 + 1.0
IDS_OF_SHARDED_ROW_UPDATES = jnp.array(
    [0, 3, 2, np.iinfo("int32").max], "int32"
)  # the last stands for no row
GRADIENT = jnp.arange(8.0).reshape(4, 2) - 3.0
INPUTS = (TABLE, SLOT, IDS_OF_SHARDED_ROW_UPDATES, GRADIENT)


def adagrad(table, slot, ids, gradient):
    rows, slots = rows_to_update(table, ids), rows_to_update(slot, ids)
    slots = slots + jnp.square(gradient)
    rows = rows - 0.5 * gradient / jnp.sqrt(slots + 1e-7)
    return with_updated_rows(table, ids, rows), with_updated_rows(slot, ids, slots), slot.sum()


def table_read_again(table, slot, ids, gradient):
    rows = rows_to_update(table, ids)
    table = with_updated_rows(table, ids, rows - gradient)
    return table, slot + table, gradient


def of_rows(change: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """An update of the rows alone; the slot is doubled, and the gradient added up."""

    def update(table, slot, ids, gradient):
        rows = rows_to_update(table, ids)
        rows, result = change(rows, gradient)
        return with_updated_rows(table, ids, rows), slot * 2, result

    return update


OWN_UPDATES = {"adagrad": adagrad, "sgd": of_rows(lambda r, g: (r - 0.5 * g, g.sum()))}
UPDATES = OWN_UPDATES | {
    "by the norm of all rows": of_rows(lambda r, g: (r - 0.1 * g * jnp.linalg.norm(r), g)),
    "rows that leave": of_rows(lambda r, g: (r - g, r)),
    "table read again": table_read_again,
}


def parted(update: Callable[..., Any]) -> ShardedRowUpdates:
    jaxpr = jax.make_jaxpr(update)(*INPUTS).jaxpr
    return ShardedRowUpdates.of(jaxpr, [True, True, False, False], TOPOLOGY)


@pytest.mark.parametrize("name", UPDATES)
def test_numbers_are_those_of_the_update(name) -> None:
    update = UPDATES[name]
    own = parted(update)
    assert any(own.is_own) == (name in OWN_UPDATES)
    by_rows = NamedSharding(TOPOLOGY.mesh, PartitionSpec(REPLICA_AXIS))
    placed = [jax.device_put(one, by_rows) for one in (TABLE, SLOT)]
    got = jax.jit(lambda *inputs: own.values(inputs))(*placed, IDS_OF_SHARDED_ROW_UPDATES, GRADIENT)
    for one, wanted in zip(got, update(*INPUTS), strict=True):
        np.testing.assert_allclose(one, wanted, rtol=1e-6)


@pytest.mark.parametrize("update", OWN_UPDATES.values(), ids=OWN_UPDATES)
def test_no_row_is_sent(update) -> None:
    own = parted(update)
    elsewhere = jax.make_jaxpr(update)(*INPUTS).jaxpr
    assert not any(ShardedRowUpdates.of(elsewhere, [False] * 4, TOPOLOGY).is_own)
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
