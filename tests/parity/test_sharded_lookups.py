"""Lookups in sharded tables: few rows are exchanged, tables of which many are read are gathered."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem as sg

ROWS, WIDTH = 2048, 64
FEW, MANY = (2, 3), (2, 300)  # ids of a replica: fewer rows than half of the table, or more


def loss_of(table: Any, ids: Any, *, is_tied: bool) -> Any:
    rows = table(ids)
    if is_tied:  # as by the head of a language model
        rows = keras.ops.matmul(rows, keras.ops.transpose(table.embeddings)) * 0.01
    return keras.ops.sum(rows**2)


def trained(ids: np.ndarray, *, is_tied: bool) -> tuple[np.ndarray, list[Any]]:
    """Runs two steps with a table in shards; returns its value and the lookups of its program."""
    strategy = sg.MirroredStrategy([f"cpu:{one}" for one in range(len(ids))], shard_state="all")
    keras.utils.set_random_seed(1)
    with strategy.scope():
        table = keras.layers.Embedding(ROWS, WIDTH)
        table.build()
        rule = keras.optimizers.SGD(0.1)
        rule.build([table.embeddings])

    def step(own_ids: Any) -> Any:
        value, grads = sg.value_and_grad(
            lambda: loss_of(table, own_ids, is_tied=is_tied), [table.embeddings]
        )
        rule.apply(grads, [table.embeddings])
        return value

    given = strategy.distribute_values_from_function(
        lambda context: jnp.asarray(ids[context.replica_id_in_sync_group])
    )
    for _ in range(2):
        strategy.run(step, args=(given,))
    (program,) = strategy.executor.programs
    return np.asarray(table.embeddings.value), program.trace.lookups


def expected(ids: np.ndarray, *, is_tied: bool) -> np.ndarray:
    """Computes the steps with NumPy, by the derivative of the loss."""
    keras.utils.set_random_seed(1)
    layer = keras.layers.Embedding(ROWS, WIDTH)
    layer.build()
    table = np.asarray(layer.embeddings.value, "float64")
    flat = ids.reshape(-1)
    for _ in range(2):
        rows, gradient = table[flat], np.zeros_like(table)
        outer = 2 * rows
        if is_tied:
            outer = 2e-4 * (rows @ (table.T @ table))
            gradient += 2e-4 * table @ (rows.T @ rows)
        np.add.at(gradient, flat, outer)
        table = table - 0.1 * gradient
    return table


@pytest.mark.parametrize(
    "is_tied", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["alone", "tied"]
)
@pytest.mark.parametrize("shape", [FEW, MANY], ids=["few", "many"])
def test_numbers_are_those_of_the_whole_table(shape: tuple[int, int], is_tied: bool) -> None:
    ids = np.random.default_rng(0).integers(0, ROWS, (2, *shape)).astype("int32")
    table, lookups = trained(ids, is_tied=is_tied)
    np.testing.assert_allclose(table, expected(ids, is_tied=is_tied), rtol=2e-6, atol=2e-7)
    # A table that is read whole anyway, or of which many rows are read, is gathered.
    assert bool(lookups) == (shape == FEW and not is_tied)
