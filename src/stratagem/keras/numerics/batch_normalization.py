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

import jax.numpy as jnp

from stratagem.execution.context.replica import ReplicaContext
from stratagem.execution.tracing.functionalize import ReplicaScope, current_scope
from stratagem.keras.numerics.batch_rows import row_mask
from stratagem.keras.numerics.step_mode import lockstep_context, replica_context
from stratagem.keras.private import get_stateless_scope
from stratagem.keras.private.variables import annotate, reduction_axes
from stratagem.keras.variables.annotations import annotated_variables
from stratagem.options import ReduceOp
from stratagem.variables.kind import VariableKind
from stratagem.variables.registry import home_of

if TYPE_CHECKING:
    import jax
    import keras


_MOVING = ("moving_mean", "moving_variance", "moving_stddev", "renorm_mean", "renorm_stddev")


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


def annotating_statistics(build: Callable[..., Any]) -> Any:
    """Returns `BatchNormalization.build` whose moving statistics are ON_READ with MEAN."""

    def replica_build(self: keras.layers.BatchNormalization, input_shape: object) -> None:
        add_weight: Callable[..., Any] = self.add_weight

        def annotated(*args: object, **kwargs: object) -> Any:
            if kwargs.get("name") not in _MOVING:
                return add_weight(*args, **kwargs)
            with annotated_variables(synchronization="on_read", aggregation="mean"):
                variable = add_weight(*args, **kwargs)
            annotate(variable, synchronization="on_read", aggregation="mean")
            return variable

        # Replaced on the instance, so that a subclass's add_weight is still called.
        object.__setattr__(self, "add_weight", annotated)
        try:
            build(self, input_shape)
        finally:
            object.__delattr__(self, "add_weight")

    return replica_build


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
