"""Metric updates in a replica, so that the result over all replicas matches a single device.

A metric that adds up over rows is updated with this replica's rows. Any other metric is updated
on each replica with the rows of all, and counted on replica 0. Keras's own metrics add up; for
others, the operations of their update are analyzed. In a custom step (`strategy.run`) each replica
updates its part with its rows, as in TensorFlow.
"""

from __future__ import annotations

import inspect
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import jax
import jax.numpy as jnp
import keras

from stratagem.contexts import get_strategy
from stratagem.execution.analysis.row_effects import RowEffect, adds_to_inputs, row_effects
from stratagem.execution.context.replica import ReplicaContext
from stratagem.keras.numerics.batch_rows import first_rows, gathered_rows, num_rows, whole_batch
from stratagem.keras.numerics.loss_effects import is_by_rows, is_of_keras
from stratagem.keras.numerics.step_mode import (
    StepMode,
    batch_fraction,
    current_mode,
    is_loss_tracker,
    record_loss,
    step_mode,
)
from stratagem.keras.numerics.step_terms import terms_of
from stratagem.keras.private.variables import averaged, averaged_function
from stratagem.messages import explain
from stratagem.options import VariableAggregation
from stratagem.variables.aggregation import aggregate_components
from stratagem.variables.kind import VariableKind
from stratagem.variables.registry import home_of

if TYPE_CHECKING:
    from jax.typing import ArrayLike, DTypeLike


# Metrics whose first update was tried: it creates variables in some of them.
_tried: weakref.WeakSet[Any] = weakref.WeakSet()
_ADDITIVE = {RowEffect.INPUT, RowEffect.INPUT_PLUS_SUM}


def update_in_replica(
    update_state: Callable[..., Any],
    metric: keras.metrics.Metric,
    args: tuple[object, ...],
    kwargs: dict[str, object],
    context: ReplicaContext,
) -> Any:
    """Updates a metric with one replica's arguments of `update_state`, true examples only."""
    _check_homes(metric, context)
    bound = inspect.signature(update_state).bind(metric, *args, **kwargs)
    values = jax.tree.leaves(list(bound.arguments.values())[1:2])
    is_empty = not metric.variables and not is_of_keras(update_state)  # Hides inner metrics.
    if not values or is_empty:
        return update_state(*bound.args, **bound.kwargs)
    if all(jnp.ndim(value) == 0 for value in values):
        return _update_with_scalar(update_state, metric, values[0], bound, context)
    rows = num_rows(values[0], context)
    if rows is None:
        return update_state(*bound.args, **bound.kwargs)
    if current_mode() is StepMode.OWN:
        if _averages_batches(metric, bound.arguments):
            _weigh_by_examples(bound, metric.dtype, context)
    elif not _adds_up(update_state, metric, bound, rows):
        return _update_with_whole_batch(update_state, metric, bound, context, rows)
    return _update_with_true_rows(update_state, metric, bound, context, rows)


def _update_with_scalar(
    update_state: Callable[..., Any],
    metric: keras.metrics.Metric,
    value: ArrayLike,
    bound: inspect.BoundArguments,
    context: ReplicaContext,
) -> Any:
    """Updates a metric with one number that each replica computed from its examples."""
    if is_loss_tracker(metric):
        return record_loss(cast("keras.metrics.Mean", metric), value, context)
    if current_mode() is StepMode.OWN:
        return update_state(*bound.args, **bound.kwargs)
    if isinstance(value, jax.Array):
        first = list(bound.arguments)[1]
        bound.arguments[first] = terms_of([bound.arguments[first]], context)[0]
    if not is_of_keras(update_state) or "sample_weight" not in bound.signature.parameters:
        return _update_with_whole_batch(update_state, metric, bound, context, None)
    weight = bound.arguments.get("sample_weight")
    if isinstance(weight, int) and weight == context.batch.size:  # Set by Keras.
        bound.arguments["sample_weight"] = jnp.asarray(context.num_examples, metric.dtype)
    else:
        _weigh_by_examples(bound, metric.dtype, context)
    return update_state(*bound.args, **bound.kwargs)


def _weigh_by_examples(
    bound: inspect.BoundArguments, dtype: DTypeLike, context: ReplicaContext
) -> None:
    """Weights one number per batch by this replica's fraction of the examples."""
    weight = bound.arguments.get("sample_weight")
    fraction = batch_fraction(context, dtype)
    whole = fraction if weight is None else jnp.asarray(weight, dtype) * fraction
    bound.arguments["sample_weight"] = whole


def _averages_batches(metric: object, arguments: dict[str, Any]) -> bool:
    """Returns True if a metric averages one number per batch, such as a mean over rows."""
    if not isinstance(metric, keras.metrics.MeanMetricWrapper):
        return False
    weight = arguments.get("sample_weight")
    if weight is not None and jnp.ndim(weight):
        return False
    return _averaged_shape(metric, arguments) == ()


def _averaged_shape(
    metric: keras.metrics.MeanMetricWrapper, arguments: dict[str, Any]
) -> tuple[int, ...]:
    y_true, y_pred = (jnp.asarray(arguments[name]) for name in ("y_true", "y_pred"))

    def values(y_true: jax.Array, y_pred: jax.Array) -> Any:
        return keras.ops.convert_to_tensor(averaged(metric, y_true, y_pred))

    with step_mode(StepMode.WHOLE):
        return jax.eval_shape(values, y_true, y_pred).shape


def _adds_up(
    update_state: Callable[..., Any],
    metric: keras.metrics.Metric,
    bound: inspect.BoundArguments,
    rows: int,
) -> bool:
    """Returns True if an update adds a sum over rows, so that replicas can sum their parts."""
    if any(home.kind is not VariableKind.ON_READ for home in _homes(metric)):
        return True  # No components to count on one replica.
    if is_of_keras(update_state):
        if not isinstance(metric, keras.metrics.MeanMetricWrapper):
            return True
        function = averaged_function(metric)
        if is_by_rows(function):
            has_axis = jnp.ndim(bound.arguments["y_pred"]) > 1  # Otherwise it reduces the rows.
            return has_axis and _averaged_shape(metric, bound.arguments) != ()
    return _is_seen_to_add_up(update_state, metric, bound, rows)


def _check_homes(metric: keras.metrics.Metric, context: ReplicaContext) -> None:
    if any(home is None for home in _homes(metric)):
        raise ValueError(
            explain(
                f"The metric {metric.name!r} was created outside the scope of a strategy, but a "
                f"replica function of {context.strategy} updates it.",
                expected="a metric with variables on each replica.",
                fix=f"create {type(metric).__name__}(...) in `with strategy.scope():`.",
                code="SG201",
            )
        )


def _homes(metric: keras.metrics.Metric) -> list[Any]:
    return [home_of(variable) for variable in metric.variables]


def _is_seen_to_add_up(
    update_state: Callable[..., Any],
    metric: keras.metrics.Metric,
    bound: inspect.BoundArguments,
    rows: int,
) -> bool:
    variables = metric.variables
    names = list(bound.arguments)[1:]
    leaves, structure = jax.tree.flatten([bound.arguments[name] for name in names])
    has_rows = [
        isinstance(leaf, jax.Array) and leaf.ndim > 0 and leaf.shape[0] == rows for leaf in leaves
    ]

    def update(state: list[Any], given: list[Any]) -> list[Any]:
        remaining = iter(given)
        own = [next(remaining) if one else leaf for one, leaf in zip(has_rows, leaves, strict=True)]
        arguments = dict(zip(names, structure.unflatten(own), strict=True))
        return updated_values(update_state, metric, variables, state, arguments, bound)

    state = [variable.value for variable in variables]
    with_rows = [leaf for one, leaf in zip(has_rows, leaves, strict=True) if one]
    effects = row_effects(update, state, with_rows, rows)
    return effects is not None and all(effect in _ADDITIVE for effect in effects)


def updated_values(
    update_state: Callable[..., Any],
    metric: keras.metrics.Metric,
    variables: list[Any],
    values: list[Any],
    arguments: dict[str, Any],
    bound: inspect.BoundArguments,
) -> list[Any]:
    """Returns the values of a metric's variables after an update from other values."""
    # Not a tree map, which would return the keys of the dict in another order.
    first = next(iter(bound.arguments))
    call = inspect.BoundArguments(bound.signature, OrderedDict({first: metric} | arguments))
    mapping = list(zip(variables, values, strict=True))
    with step_mode(StepMode.WHOLE), keras.StatelessScope(mapping) as scope:
        update_state(*call.args, **call.kwargs)
    return [scope.get_current_value(variable) for variable in variables]


def variables_of_update(
    update_state: Callable[..., Any],
    metric: keras.metrics.Metric,
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> list[Any]:
    """Returns a metric's variables, including those that its first update creates."""
    if metric not in _tried:
        _tried.add(metric)
        with keras.StatelessScope():
            update_state(metric, *args, **kwargs)
    return metric.variables


def require_counts(
    update_state: Callable[..., Any],
    metric: keras.metrics.Metric,
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> None:
    """Raises a NotImplementedError if a worker cannot update a metric from zero.

    Workers of a coordinator start from zero in each function, and it adds up what they count.
    """
    remote: Any = get_strategy().placement.remote
    # The AUC of this library carries counts from one variable to another, whose sum adds up.
    is_known = is_of_keras(update_state) or update_state.__module__.startswith("stratagem.")
    if not getattr(remote, "counts_from_zero", False) or is_known:
        return
    variables = variables_of_update(update_state, metric, args, kwargs)
    bound = inspect.signature(update_state).bind(metric, *args, **kwargs)
    given = dict(list(bound.arguments.items())[1:])

    def update(state: list[Any]) -> list[Any]:
        return updated_values(update_state, metric, variables, state, given, bound)

    if not adds_to_inputs(update, [variable.value for variable in variables]):
        raise NotImplementedError(
            explain(
                f"The metric {metric.name!r} does not add to its state, but workers of parameter "
                "servers count apart, each from zero.",
                expected="an update_state that adds to each variable a number that the variable "
                "does not change: no maximum, and no average of earlier values.",
                fix="sum what the result is computed from, or evaluate under another strategy.",
            )
        )


def _update_with_whole_batch(
    update_state: Callable[..., Any],
    metric: keras.metrics.Metric,
    bound: inspect.BoundArguments,
    context: ReplicaContext,
    rows: int | None,
) -> None:
    """Updates with the rows and the state of all replicas, and counts on replica 0."""
    arguments = {
        name: gathered_rows(value, context, rows)
        for name, value in list(bound.arguments.items())[1:]
    }
    variables = variables_of_update(update_state, metric, bound.args[1:], bound.kwargs)
    state = [of_all_replicas(variable, context) for variable in variables]
    with whole_batch(context):
        values = updated_values(update_state, metric, variables, state, arguments, bound)
    is_first = context.replica_id_in_sync_group == 0
    for variable, value in zip(variables, values, strict=True):
        home = home_of(variable)
        if home is not None and home.aggregation is VariableAggregation.SUM:
            value = jnp.where(is_first, value, jnp.zeros_like(value))
        variable.assign(value)


def of_all_replicas(variable: keras.Variable, context: ReplicaContext) -> Any:
    """Returns a variable's value over all components; a collective, so call on every replica."""
    home = home_of(variable)
    if home is None or home.kind is not VariableKind.ON_READ:
        return variable.value
    stacked = context.communicator.all_gather(jnp.expand_dims(variable.value, 0), 0, None)
    return aggregate_components(stacked, home.aggregation, variable.path)


def _update_with_true_rows(
    update_state: Callable[..., Any],
    metric: keras.metrics.Metric,
    bound: inspect.BoundArguments,
    context: ReplicaContext,
    rows: int,
) -> Any:
    """Updates with this replica's true rows, with one branch per number of rows."""
    if not context.batch.is_padded:
        return update_state(*bound.args, **bound.kwargs)
    if isinstance(context.num_examples, int):  # Eager replicas have no padding.
        return update_state(*bound.args, **bound.kwargs) if context.num_examples else None
    lengths = sorted(set(context.batch.lengths or ()))
    variables = variables_of_update(update_state, metric, bound.args[1:], bound.kwargs)

    def branch(length: int) -> Any:
        def update(values: list[Any]) -> list[Any]:
            if length == 0:
                return values
            arguments = {
                name: first_rows(value, length, context, rows)
                for name, value in list(bound.arguments.items())[1:]
            }
            return updated_values(update_state, metric, variables, values, arguments, bound)

        return update

    index = jnp.searchsorted(jnp.asarray(lengths), context.num_examples)
    current = [variable.value for variable in variables]
    updated = jax.lax.switch(index, [branch(length) for length in lengths], current)
    for variable, value in zip(variables, updated, strict=True):
        variable.assign(value)
    return None
