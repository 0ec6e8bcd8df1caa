"""Rows of a step's batch: true rows, masks, the first examples, and the rows of all replicas."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import stratagem as sg
from stratagem.execution.context.replica import ReplicaBatch, ReplicaContext, get_replica_context
from stratagem.keras.numerics.batch_normalization import (
    first_rows,
    gathered_rows,
    num_rows,
    row_mask,
    true_rows,
    whole_batch,
)
from stratagem.keras.numerics.step_mode import StepMode, current_mode


def context_of(size: int | None, lengths: tuple[int, ...] | None = None) -> ReplicaContext:
    """The context of replica 0."""
    strategy: Any = sg.get_strategy()
    return ReplicaContext(strategy, batch=ReplicaBatch(size=size, lengths=lengths))


def test_padding_rows_become_zeros() -> None:
    values = jnp.arange(1.0, 9.0).reshape(4, 2)
    kept = true_rows(values, context_of(4, (3, 4)))
    np.testing.assert_array_equal(kept, [[1, 2], [3, 4], [5, 6], [0, 0]])
    assert true_rows(values, context_of(4)) is values


@pytest.mark.slow
def test_mask_repeats_each_example_where_time_was_flattened() -> None:
    mask = row_mask(jnp.ones((6, 2)), context_of(3, (2, 3)))
    assert mask.shape == (6, 1)
    assert np.ravel(mask).tolist() == [True] * 4 + [False] * 2


@pytest.mark.parametrize(
    ("shape", "size", "lengths"),
    [((3,), 3, None), ((), 3, (2, 3)), ((4,), 3, (2, 3)), ((3,), 0, (0, 0)), ((3,), None, None)],
    ids=["unpadded", "scalar", "not a multiple", "empty", "no batch"],
)
def test_array_that_is_no_padded_batch_has_no_mask(shape, size, lengths) -> None:
    assert row_mask(jnp.ones(shape), context_of(size, lengths)) is None


@pytest.mark.parametrize(
    ("shape", "size", "expected"),
    [
        ((4, 2), 4, 4),
        ((8,), 4, 8),
        ((6,), 4, None),
        ((0, 2), 4, None),
        ((0,), 0, 0),
        ((), 4, None),
        ((4,), None, None),
    ],
)
def test_number_of_rows_is_a_multiple_of_the_batch(shape, size, expected) -> None:
    assert num_rows(np.ones(shape), context_of(size)) == expected


def test_first_examples_are_cut_from_arrays_with_rows_alone() -> None:
    tree = {"x": jnp.arange(4), "other": jnp.arange(3), "n": 4, "scalar": jnp.ones(())}
    cut = first_rows(tree, 2, context_of(4))
    np.testing.assert_array_equal(cut["x"], [0, 1])
    assert all(cut[name] is tree[name] for name in ("other", "n", "scalar"))
    steps = first_rows(jnp.arange(8), 2, context_of(4), rows=8)
    np.testing.assert_array_equal(steps, [0, 1, 2, 3])


def test_rows_of_all_replicas_come_without_padding() -> None:
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    parts = [np.array([1.0, 2.0], np.float32), np.array([3.0], np.float32)]
    own = strategy.distribute_values_from_function(
        lambda context: jnp.asarray(parts[context.replica_id_in_sync_group])
    )

    def step(rows: Any) -> Any:
        context = get_replica_context()
        assert context is not None
        mean = jnp.sum(true_rows(rows, context)) / jnp.asarray(context.num_examples, rows.dtype)
        size = context.batch.size
        found = gathered_rows({"x": rows, "mean": mean, "size": size, "flag": True}, context, size)
        assert (found["size"], found["flag"]) == (3, True)
        return context.all_reduce("mean", jnp.sum(found["x"])), found["mean"], found["x"].shape[0]

    total, mean, rows = strategy.run(step, args=(own,))
    for value, expected in ((total, 6.0), (mean, 2.0)):
        for part in strategy.local_results(value):
            assert float(part) == pytest.approx(expected)
    assert set(map(int, strategy.local_results(rows))) == {3}


def test_whole_batch_is_one_replica_without_padding() -> None:
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])

    def step(rows: Any) -> Any:
        context = get_replica_context()
        assert context is not None
        with whole_batch(context):
            inner = get_replica_context()
            assert inner is not None
            assert inner.batch == ReplicaBatch(size=6)
            assert current_mode() is StepMode.WHOLE
        assert get_replica_context() is context
        return rows

    own = strategy.distribute_values_from_function(lambda _: jnp.ones(3))
    strategy.run(step, args=(own,))
