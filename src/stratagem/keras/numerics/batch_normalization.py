"""Batch normalization over replicas.

Each replica normalises with its own statistics, over true examples; with `synchronized=True` with
those of all replicas that train in lockstep. Moving statistics are ON_READ with MEAN: each replica
keeps its own, and reading them outside gives the mean.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import keras

from stratagem import contexts as stack
from stratagem.execution.replica_context import ReplicaBatch, ReplicaContext
from stratagem.execution.tracing.functionalize import ReplicaScope, current_scope
from stratagem.keras.numerics.step_mode import (
    StepMode,
    example_fraction,
    lockstep_context,
    replica_context,
    step_mode,
)
from stratagem.keras.patches import patches
from stratagem.keras.private import (
    annotate,
    get_keras_mask,
    get_stateless_scope,
    reduction_axes,
    set_keras_mask,
)
from stratagem.keras.variables.requests import annotated
from stratagem.options import ReduceOp
from stratagem.variables.registry import VariableKind, home_of

if TYPE_CHECKING:
    from jax.typing import ArrayLike

# Rows of a step's batch: masks of true rows, and rows gathered from all replicas.


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


_MOVING = ("moving_mean", "moving_variance", "moving_stddev", "renorm_mean", "renorm_stddev")


@patches(
    keras.layers.BatchNormalization,
    "__init__",
    why="synchronized=True, which Keras rejects on JAX",
)
def taking_synchronized(init: Callable[..., Any]) -> Any:
    """Returns `BatchNormalization.__init__` that accepts `synchronized=True`."""

    def replica_init(
        self: keras.layers.BatchNormalization,
        *args: object,
        synchronized: bool = False,
        **kwargs: object,
    ) -> None:
        init(self, *args, **kwargs)
        self.synchronized = bool(synchronized)

    replica_init.__signature__ = inspect.signature(init)  # Read by get_config and clone.
    replica_init.__doc__ = init.__doc__
    return replica_init


@patches(keras.layers.BatchNormalization, "build", why="moving statistics are ON_READ with MEAN")
def annotating_statistics(build: Callable[..., Any]) -> Any:
    """Returns `BatchNormalization.build` whose moving statistics are ON_READ with MEAN."""

    def replica_build(self: keras.layers.BatchNormalization, input_shape: object) -> None:
        add_weight: Callable[..., Any] = self.add_weight

        def add_annotated(*args: object, **kwargs: object) -> Any:
            if kwargs.get("name") not in _MOVING:
                return add_weight(*args, **kwargs)
            with annotated(kind=("on_read", "mean")):
                variable = add_weight(*args, **kwargs)
            annotate(variable, synchronization="on_read", aggregation="mean")
            return variable

        # Replaced on the instance, so that a subclass's add_weight is still called.
        object.__setattr__(self, "add_weight", add_annotated)
        try:
            build(self, input_shape)
        finally:
            object.__delattr__(self, "add_weight")

    return replica_build


@patches(
    keras.layers.BatchNormalization,
    "call",
    why="padding leaves the statistics unchanged; inference uses those of all replicas",
)
def normalizing_true_rows(call: Callable[..., Any]) -> Any:
    """Returns `BatchNormalization.call` that skips padding and infers with all statistics."""

    def replica_call(
        self: keras.layers.BatchNormalization,
        inputs: object,
        training: object = None,
        mask: object = None,
    ) -> Any:
        context = lockstep_context()
        if context is None:
            return call(self, inputs, training=training, mask=mask)
        if not training or not self.trainable:
            with _aggregated_statistics(self, context):
                return call(self, inputs, training=training, mask=mask)
        if not context.batch.is_padded:
            return call(self, inputs, training=training, mask=mask)
        moving = [v for v in (getattr(self, name, None) for name in _MOVING) if v is not None]
        before = [jnp.asarray(variable.value) for variable in moving]
        outputs = call(self, inputs, training=training, mask=mask)
        counted = context.island.global_num_examples if self.synchronized else context.num_examples
        has_examples = counted > 0
        for variable, old in zip(moving, before, strict=True):
            variable.assign(jnp.where(has_examples, variable.value, old))
        return outputs

    return replica_call


@patches(
    keras.layers.BatchNormalization,
    "_moments",
    why="mean and variance over true examples, of all replicas if synchronized",
)
def moments_of_replicas(moments: Callable[..., Any]) -> Any:
    """Returns the method of `BatchNormalization` that computes mean and variance of a batch."""

    def replica_moments(
        self: keras.layers.BatchNormalization, inputs: jax.Array, mask: object
    ) -> Any:
        context = replica_context()
        if context is None or not (self.synchronized or context.batch.is_padded):
            return _plain_moments(moments, self, inputs, mask)
        return _moments_of_true_rows(self, inputs, mask, context.island)

    return replica_moments


@contextlib.contextmanager
def _aggregated_statistics(layer: keras.layers.Layer, context: ReplicaContext) -> Generator[None]:
    """Makes inference use the mean of all replicas' moving statistics, as one device would."""
    variables = (layer.moving_mean, layer.moving_variance)
    homes = [home_of(variable) for variable in variables]
    outer: Any = get_stateless_scope()
    root = current_scope()
    if root is None or any(home is None or home.kind is not VariableKind.ON_READ for home in homes):
        yield
        return

    def read(variable: keras.Variable) -> Any:
        value = outer.get_current_value(variable)
        return root.get_current_value(variable) if value is None else value

    both = jnp.stack([jnp.asarray(variable.value) for variable in variables])
    mean, variance = context.communicator.all_reduce(ReduceOp.MEAN, both)
    scope = ReplicaScope(read)
    scope.set_value(layer.moving_mean, mean)
    scope.set_value(layer.moving_variance, variance)
    with scope:
        yield


def _plain_moments(
    moments: Callable[..., Any],
    layer: keras.layers.BatchNormalization,
    inputs: object,
    mask: object,
) -> Any:
    synchronized, layer.synchronized = (
        layer.synchronized,
        False,
    )  # Keras on JAX rejects synchronized=True.
    try:
        return moments(layer, inputs, mask)
    finally:
        layer.synchronized = synchronized


def _moments_of_true_rows(
    layer: keras.layers.BatchNormalization, inputs: jax.Array, mask: object, context: ReplicaContext
) -> Any:
    """Returns mean and variance over true positions, of all replicas if synchronized."""
    weights = jnp.ones((inputs.shape[0],) + (1,) * (inputs.ndim - 1), inputs.dtype)
    rows = row_mask(inputs, context)
    if rows is not None:
        weights = weights * rows.astype(inputs.dtype)
    if mask is not None:
        weights = weights * jnp.asarray(mask, inputs.dtype)[..., None]
    axes = reduction_axes(layer)
    inputs = jnp.where(weights > 0, inputs, 0)

    def total(values: jax.Array) -> Any:
        local = jnp.sum(values, axis=axes)
        return context.communicator.all_reduce(ReduceOp.SUM, local) if layer.synchronized else local

    shape = [1] * inputs.ndim
    shape[layer.axis] = inputs.shape[layer.axis]
    count = jnp.maximum(total(jnp.broadcast_to(weights, inputs.shape)), 1.0)
    mean = total(inputs * weights) / count
    variance = total(jnp.square(inputs - mean.reshape(shape)) * weights) / count
    return mean, variance
