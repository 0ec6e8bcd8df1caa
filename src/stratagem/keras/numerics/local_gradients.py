"""Gradients of replicas that train apart: those of their island."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from stratagem.execution.context.replica import ReplicaContext
from stratagem.keras.numerics.step_mode import StepMode, current_mode, example_fraction
from stratagem.options import ReduceOp
from stratagem.variables.indexed_slices import IndexedSlices, is_indexed_slices


def island_gradients(grads: Sequence[Any], context: ReplicaContext) -> list[Any]:
    """Returns gradients of the mean loss over the examples of this replica's island.

    In `fit` losses are shares of that mean, or means over a replica's own examples. In a loop of
    one's own a gradient is a part of the sum over all replicas, as for any strategy, and the sum
    of an island is scaled.

    Args:
        grads: this replica's gradients: arrays, rows or None.
        context: of this replica, among all replicas.
    """
    island, mode = context.island, current_mode()
    if mode is StepMode.MEAN and island.num_replicas_in_sync > 1:
        grads = [_times(grad, lambda part: example_fraction(island, part.dtype)) for grad in grads]
    sums = _sums(grads, island)
    if mode is not StepMode.OWN:
        return sums
    return [_times(grad, lambda part: _inverse_fraction(context, part.dtype)) for grad in sums]


def _sums(grads: Sequence[Any], island: ReplicaContext) -> list[Any]:
    """Returns sums over the replicas of an island; for row gradients, the rows of all of them."""
    if island.num_replicas_in_sync == 1:
        return list(grads)
    whole = [grad for grad in grads if grad is not None and not is_indexed_slices(grad)]
    summed = iter(island.communicator.all_reduce_many(ReduceOp.SUM, whole))
    return [
        island.communicator.all_reduce_slices(ReduceOp.SUM, grad)
        if isinstance(grad, IndexedSlices)
        else None
        if grad is None
        else next(summed)
        for grad in grads
    ]


def _inverse_fraction(context: ReplicaContext, dtype: Any) -> Any:
    """Returns the examples of all replicas divided by those of the island; 0 without examples."""
    island = context.island
    if not context.batch.is_padded or not context.batch.has_examples:
        return jnp.asarray(context.num_replicas_in_sync / island.num_replicas_in_sync, dtype)
    own = jnp.asarray(island.global_num_examples, jnp.float32)
    whole = jnp.asarray(context.global_num_examples, jnp.float32)
    return jnp.where(own == 0, 0, whole / jnp.maximum(own, 1)).astype(dtype)


def _times(grad: Any, factor: Callable[[jax.Array], jax.Array]) -> Any:
    """Returns a gradient times `factor(array)`; the indices of rows stay.

    Without examples the gradient is 0, even where a loss of none is not a number.
    """

    def scaled(part: jax.Array) -> jax.Array:
        if not jnp.issubdtype(part.dtype, jnp.inexact):
            return part
        by = factor(part)
        return jnp.where(by == 0, jnp.zeros_like(part), part * by)

    return jax.tree.map(scaled, grad)
