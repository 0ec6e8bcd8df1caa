"""Scatter updates of an array's rows: add, multiply, minimum and others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from stratagem.variables.indexed_slices import IndexedSlices

# Indices past the end are padding.
_APPLY: dict[str, Callable[[Any, Any], Any]] = {
    "scatter_add": lambda rows, values: rows.add(values, mode="drop"),
    "scatter_sub": lambda rows, values: rows.add(-values, mode="drop"),
    "scatter_mul": lambda rows, values: rows.multiply(values, mode="drop"),
    "scatter_div": lambda rows, values: rows.divide(values, mode="drop"),
    "scatter_min": lambda rows, values: rows.min(values, mode="drop"),
    "scatter_max": lambda rows, values: rows.max(values, mode="drop"),
    "scatter_update": lambda rows, values: rows.set(values, mode="drop"),
}
_SETTING = ("scatter_min", "scatter_max", "scatter_update")


def sets_rows(method: str) -> bool:
    """Returns True if a method such as "scatter_min" does not first sum rows of equal index."""
    return method in _SETTING


def changed_rows(method: str, value: object, slices: IndexedSlices) -> jax.Array:
    """Applies a method such as "scatter_add" to rows of an array of shape (n, ...).

    Indices past the end are ignored.

    Example:
        >>> from stratagem.variables.row_changes import changed_rows
        >>> rows = sg.IndexedSlices(jax.numpy.array([5.0, 5.0]), jax.numpy.array([1, 1]))
        >>> changed_rows("scatter_mul", jax.numpy.ones(3), rows)
        Array([ 1., 10.,  1.], dtype=float32)
    """
    if not sets_rows(method):
        slices = slices.combined()
    value = jnp.asarray(value)
    rows = value.at[jnp.asarray(slices.indices)]
    return _APPLY[method](rows, jnp.asarray(slices.values, value.dtype))
