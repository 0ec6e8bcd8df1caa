"""Conversion between an ON_READ variable's components and its aggregated value."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from stratagem.messages import explain
from stratagem.options import VariableAggregation

if TYPE_CHECKING:
    import jax


def aggregate_components(
    stacked: jax.Array | np.ndarray, aggregation: VariableAggregation, name: str
) -> Any:
    """Aggregates components of shape (num_replicas, ...) to a value of shape (...).

    Raises ValueError for aggregation NONE. Source: TF 2.21 values.py, SyncOnReadVariable.
    """
    if aggregation is VariableAggregation.SUM:
        return jnp.sum(stacked, axis=0, dtype=stacked.dtype)
    if aggregation is VariableAggregation.MEAN:
        return mean_of_components(stacked)
    if aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
        return stacked[0]
    raise ValueError(
        explain(
            f"Variable {name!r} is ON_READ with aggregation NONE, but was read in cross-replica "
            "context.",
            expected="an aggregation that combines its components to one value.",
            fix='create it with aggregation="sum", "mean" or "only_first_replica", or read it in a '
            "replica function.",
        )
    )


def mean_of_components(stacked: jax.Array | np.ndarray) -> Any:
    """Returns the mean over axis 0; equal components give that value, not one rounded thrice."""
    mean = jnp.mean(stacked, axis=0)
    are_equal = jnp.all(stacked == stacked[:1], axis=0)
    return jnp.where(are_equal, stacked[0].astype(mean.dtype), mean)


def spread_over_components(value: Any, aggregation: VariableAggregation, num_replicas: int) -> Any:
    """Splits a value into components of shape (num_replicas, ...), the inverse of aggregation.

    With SUM, each component is value / num_replicas; the first also gets the remainder of an
    integer. Otherwise each component is the value. The result is a NumPy array, or a JAX array if
    traced.

    Source: TF 2.21 values_util.py, on_read_assign_cross_replica.
    """
    xp: Any = jnp if isinstance(value, Tracer) else np
    value = xp.asarray(value)
    shape = (num_replicas, *value.shape)
    if aggregation is not VariableAggregation.SUM or value.dtype == bool:
        return xp.array(xp.broadcast_to(value, shape))
    if xp.issubdtype(value.dtype, xp.integer):
        quotient, rest = value // num_replicas, value % num_replicas
        is_first = (xp.arange(num_replicas) == 0).reshape((-1,) + (1,) * value.ndim)
        return xp.where(is_first, quotient + rest, quotient)
    return xp.array(xp.broadcast_to(value / num_replicas, shape), value.dtype)
