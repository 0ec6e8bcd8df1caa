"""Rows of a step's batch: masks of true rows, and rows gathered from all replicas."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from stratagem import contexts as stack
from stratagem.execution.context.batch import ReplicaBatch
from stratagem.execution.context.replica import ReplicaContext
from stratagem.keras.numerics.step_mode import StepMode, example_fraction, step_mode
from stratagem.keras.private import get_keras_mask, set_keras_mask
from stratagem.options import ReduceOp

if TYPE_CHECKING:
    from jax.typing import ArrayLike


def true_rows(values: jax.Array, context: ReplicaContext) -> Any:
    """Returns the array with zeros in its padding rows."""
    mask = row_mask(values, context)
    return values if mask is None else jnp.where(mask, values, jnp.zeros((), values.dtype))


def row_mask(values: jax.Array, context: ReplicaContext) -> Any:
    """Returns a mask of true rows that broadcasts against an array.

    Axis 0 of the array is this replica's batch or a multiple of it (as after flattening time). None
    if every row is true or axis 0 is not the batch.
    """
    batch = context.batch
    if not batch.is_padded or values.ndim == 0 or not batch.size or values.shape[0] % batch.size:
        return None
    mask = jnp.repeat(context.example_mask, values.shape[0] // batch.size)
    return mask.reshape((-1,) + (1,) * (values.ndim - 1))


def num_rows(values: ArrayLike, context: ReplicaContext) -> int | None:
    """Returns the size of axis 0 if it is this replica's batch size or a multiple, else None."""
    size, shape = context.batch.size, jnp.shape(values)
    if size is None or not shape:
        return None
    is_batch = shape[0] == size or (size and shape[0] and shape[0] % size == 0)
    return shape[0] if is_batch else None


def first_rows(values: object, count: int, context: ReplicaContext, rows: int | None = None) -> Any:
    """Returns the first `count` examples of a pytree's arrays with `rows` rows; others unchanged.

    `rows` is by default the batch size.
    """
    size = context.batch.size
    rows = size if rows is None else rows
    num_first = count * (rows // size) if rows and size else count

    def cut(leaf: object) -> Any:
        if not isinstance(leaf, jax.Array) or leaf.ndim == 0:
            return leaf
        return leaf[:num_first] if leaf.shape[0] == rows else leaf

    return _with_masks(cut, values)


def gathered_rows(values: object, context: ReplicaContext, rows: int | None) -> Any:
    """Returns the true rows of all replicas for the arrays with `rows` rows. Differentiable.

    Floating scalars become means weighted by examples. The int batch size, which Keras passes as a
    weight, becomes the global number of examples.
    """
    batch = context.batch
    lengths = batch.lengths if batch.is_padded else None
    if lengths is not None and batch.size and rows is not None:
        lengths = tuple(length * (rows // batch.size) for length in lengths)

    def gathered(leaf: object) -> Any:
        if isinstance(leaf, int) and not isinstance(leaf, bool) and leaf == batch.size:
            return context.global_num_examples
        if not isinstance(leaf, jax.Array):
            return leaf
        if leaf.ndim == 0 and jnp.issubdtype(leaf.dtype, jnp.floating):
            share = leaf * example_fraction(context, leaf.dtype)
            return context.communicator.all_reduce(ReduceOp.SUM, share)
        if leaf.ndim == 0 or leaf.shape[0] != rows:
            return leaf
        return context.communicator.all_gather(leaf, 0, lengths)

    return _with_masks(gathered, values)


def with_gradient_times(values: object, factor: jax.Array) -> Any:
    """Returns a pytree of arrays as they are, with `factor` times the gradients of floats."""

    def scaled(leaf: object) -> Any:
        if not isinstance(leaf, jax.Array) or not jnp.issubdtype(leaf.dtype, jnp.inexact):
            return leaf
        return _scaling_gradient(leaf, factor.astype(leaf.dtype))

    return _with_masks(scaled, values)


@jax.custom_vjp
def _scaling_gradient(value: jax.Array, factor: jax.Array) -> jax.Array:
    del factor
    return value


_scaling_gradient.defvjp(
    lambda value, factor: (value, factor),
    lambda factor, gradient: (gradient * factor, jnp.zeros_like(factor)),
)


def _with_masks(change: Callable[[Any], Any], values: object) -> Any:
    """Maps `change` over the leaves of a pytree and over their Keras masks."""

    def changed(leaf: object) -> Any:
        result, mask = change(leaf), get_keras_mask(leaf)
        if mask is not None and result is not leaf:
            set_keras_mask(result, change(mask))
        return result

    return jax.tree.map(changed, values)


def with_known_rows(context: ReplicaContext) -> list[ReplicaContext]:
    """Returns a context for each choice of the rows of a batch; the context itself if known."""
    if not context.batch.choices:
        return [context]
    replica_id, communicator = context.replica_id_in_sync_group, context.communicator
    return [
        ReplicaContext(context.strategy, replica_id, communicator, batch)
        for batch in context.batch.alternatives()
    ]


@contextlib.contextmanager
def whole_batch(context: ReplicaContext) -> Generator[None]:
    """Runs a block as if this replica held all rows of the step, without padding or collectives."""
    batch = ReplicaBatch(size=context.global_num_examples)
    replica_id = context.replica_id_in_sync_group
    whole = ReplicaContext(context.strategy, replica_id, context.communicator, batch)
    with (
        stack.push(stack.FrameKind.REPLICA, context.strategy, whole),
        step_mode(StepMode.WHOLE),
    ):
        yield
