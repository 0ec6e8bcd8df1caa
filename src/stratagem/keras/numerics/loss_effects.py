"""Analysis of losses: per-row values, sums or means over the rows of the batch."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import keras

from stratagem.execution.analysis.row_effects import RowEffect, row_effects
from stratagem.execution.context.replica import ReplicaContext
from stratagem.keras.numerics.batch_rows import num_rows
from stratagem.keras.numerics.step_mode import StepMode, step_mode

# Keras functions whose value for one row may depend on other rows.
_MIXING_FUNCTIONS = {"circle", "dice", "tversky"}


def is_of_keras(function: object) -> bool:
    """Returns True if a function, or the class of an object, is part of Keras."""
    module = getattr(function, "__module__", None) or type(function).__module__
    return module.startswith("keras.")


def is_by_rows(function: object) -> bool:
    """Returns True for a Keras function that computes each row separately."""
    name = getattr(function, "__name__", type(function).__name__)
    return is_of_keras(function) and name not in _MIXING_FUNCTIONS


def effect_of_loss(
    loss: keras.losses.Loss, y_true: object, y_pred: object, context: ReplicaContext
) -> RowEffect:
    """Returns how a loss depends on this replica's rows; UNKNOWN if analysis fails."""
    function = getattr(loss, "fn", None) or type(loss).call
    leaves, structure = jax.tree.flatten((y_true, y_pred))
    arrays = [jnp.asarray(leaf) for leaf in leaves]
    rows = num_rows(arrays[-1], context) if arrays else None
    is_gathered = rows is not None and context.num_replicas_in_sync > 1
    is_gathered = is_gathered and rows == context.global_num_examples != context.batch.size
    has_axis = bool(arrays) and arrays[-1].ndim > 1  # Otherwise it reduces the rows.
    if (is_by_rows(function) and has_axis) or rows is None or is_gathered:
        return RowEffect.UNKNOWN
    has_rows = [array.ndim > 0 and array.shape[0] == rows for array in arrays]

    shapes: list[tuple[int, ...]] = []

    def values(_: object, given: list[Any]) -> list[Any]:
        remaining = iter(given)
        own = [next(remaining) if one else leaf for one, leaf in zip(has_rows, arrays, strict=True)]
        with step_mode(StepMode.WHOLE):
            result = loss.call(*structure.unflatten(own))
        shapes.append(jnp.shape(result))
        return [keras.ops.convert_to_tensor(result, dtype=loss.dtype)]

    given = [leaf for one, leaf in zip(has_rows, arrays, strict=True) if one]
    effects = row_effects(values, [], given, rows)
    if effects is None:
        return RowEffect.UNKNOWN
    # Keras averages several sums or means over rows: neither per-row losses nor one scalar.
    is_several = effects[0] in (RowEffect.SUM, RowEffect.MEAN) and len(shapes[-1]) > 0
    return RowEffect.MIXED if is_several else effects[0]
