"""Lookups and their gradients in blocks of rows, compared with those in a whole table."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stratagem.execution.programs import late_step
from stratagem.execution.programs import late_weights as gradient_products
from tests.unit.execution.programs.test_late_step import late_function

NUM_ROWS, WIDTH = 14, 3
# Rows from both shards, one more than once, and none of the table.
IDS = np.array([[[0, 13, 6], [7, 6, -1]], [[5, 8, 6], [12, 14, -15]]], "int32")


@pytest.fixture(autouse=True)
def _two_rows_in_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 2, 2, 2 and 1 of the seven rows of a shard, or of 4 and 3 in bfloat16."""
    monkeypatch.setattr(late_step, "_MIN_LATE_BYTES", 0)
    monkeypatch.setattr(gradient_products, "_MIN_PART_BYTES", 1)
    monkeypatch.setattr(gradient_products, "_MIN_BLOCK_BYTES", NUM_ROWS * WIDTH)


def weighted(rows: Any) -> Any:
    return jnp.sum(rows * rows * jnp.arange(1.0, 1 + rows.size).reshape(rows.shape))


def taken(table, ids):
    return weighted(jnp.nan_to_num(jnp.take(table, ids, axis=0)))


def cast(table, ids):
    rows = jnp.nan_to_num(jnp.take(table.astype("bfloat16"), ids, axis=0))
    return weighted(rows.astype("float32"))


# In blocks, and whole.
IN_BLOCKS = {
    "taken": taken,
    "clipped": lambda table, ids: weighted(jnp.take(table, ids, axis=0, mode="clip")),
    "filled": lambda t, ids: weighted(jnp.take(t, ids, axis=0, mode="fill", fill_value=7)),
    "cast": cast,
    "of one row": lambda table, ids: weighted(jnp.take(table, ids[0, 0], axis=0)),
}
LOSSES = IN_BLOCKS | {
    "rematerialized": lambda table, ids: weighted(
        jax.checkpoint(lambda one: jnp.sin(jnp.take(one, ids % 14, axis=0)))(table)
    ),
    "of columns": lambda table, ids: weighted(jnp.take(table, ids % WIDTH, axis=1)),
    "tied": lambda table, ids: taken(table, ids) + jnp.sum(jnp.tanh(table @ table[0])),
}


def table_of() -> jax.Array:
    return jax.random.normal(jax.random.key(0), (NUM_ROWS, WIDTH))


def late(loss: Any) -> Any:
    """The step whose table comes and whose gradient leaves as shards."""
    return late_function(jax.value_and_grad(loss), [table_of(), IDS[0]], [0], {1: 0})


def counts(function: Any, *args: Any) -> tuple[int, int]:
    text = str(jax.make_jaxpr(function)(*args))
    return text.count("all_gather["), text.count("reduce_scatter[")


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_rows_and_gradients_are_those_of_the_whole_table(loss) -> None:
    table = table_of()
    losses, gradient = jax.jit(late(loss))(table, IDS)
    expected = [jax.value_and_grad(loss)(table, one) for one in IDS]
    np.testing.assert_allclose(losses, [one for one, _ in expected], rtol=1e-6)
    np.testing.assert_allclose(gradient, sum(one for _, one in expected), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("loss", IN_BLOCKS.values(), ids=IN_BLOCKS)
def test_table_and_gradient_are_exchanged_in_blocks(loss, monkeypatch) -> None:
    num_blocks = 2 if loss is cast else 4
    assert counts(late(loss), table_of(), IDS) == (num_blocks, 4)
    monkeypatch.setattr(gradient_products, "_MIN_BLOCK_BYTES", 4 * NUM_ROWS * WIDTH)
    assert counts(late(loss), table_of(), IDS) == (1, 1)  # a small table is gathered whole


def test_next_block_waits_for_the_rows_of_the_one_before() -> None:
    """Two blocks are in memory at once, however many there are."""
    (eqn,) = jax.make_jaxpr(late(taken))(table_of(), IDS).jaxpr.eqns
    names = [one.primitive.name for one in eqn.params["jaxpr"].eqns]
    gathers = [place for place, name in enumerate(names) if name == "all_gather"]
    barriers = [place for place, name in enumerate(names) if name == "optimization_barrier"]
    for earlier, later in itertools.pairwise(gathers):
        assert any(earlier < one < later for one in barriers)


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_rows_outside_a_table_of_integers_are_those_of_jax(dtype) -> None:
    table = jnp.arange(NUM_ROWS * 8).reshape(NUM_ROWS, 8).astype(dtype)
    function = late_function(lambda t, ids: jnp.take(t, ids, axis=0), [table, IDS[0]], [0], {})
    assert counts(function, table, IDS)[0] > 1
    (rows,) = jax.jit(function)(table, IDS)
    np.testing.assert_array_equal(rows, jnp.take(table, IDS, axis=0))
