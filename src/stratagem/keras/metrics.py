"""Metrics over replicas: each replica updates its part, results are of all of them.

`keras.metrics.Metric.__new__` is replaced (Keras 3.12 to 3.15) to wrap `update_state` and `result`
of each metric class once, when its first object is made; subclassing `Metric` is enough.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections import OrderedDict
from collections.abc import Generator
from typing import Any

import jax
import jax.numpy as jnp
import keras

from stratagem.context import ReplicaContext, get_replica_context, has_strategy
from stratagem.keras.losses import first_rows, row_mask
from stratagem.keras.private import (
    averaged,
    get_keras_mask,
    get_stateless_scope,
    own_variables,
)
from stratagem.keras.step_mode import (
    StepMode,
    current_mode,
    example_fraction,
    is_loss_tracker,
    record_loss,
    replica_context,
)
from stratagem.keras.variable import DistributedVariable
from stratagem.variables import VariableKind, aggregate_components, home_of

__all__ = ["install", "results_of_all_replicas"]

_wrapped_classes: set[type] = {keras.metrics.Metric}


class _Active(threading.local):
    is_updating = False
    reports_all = False


_active = _Active()


def install() -> None:
    """Makes every Keras metric count over replicas. Done once, on import."""
    original = keras.metrics.Metric.__new__

    def create(cls: type, *args: Any, **kwargs: Any) -> Any:
        for base in cls.__mro__:
            if issubclass(base, keras.metrics.Metric) and base not in _wrapped_classes:
                _wrap_class(base)
        return object.__new__(cls) if original is object.__new__ else original(cls, *args, **kwargs)

    keras.metrics.Metric.__new__ = staticmethod(create)


def _wrap_class(cls: type) -> None:
    _wrapped_classes.add(cls)
    update_state, result = cls.__dict__.get("update_state"), cls.__dict__.get("result")
    if inspect.isfunction(update_state):
        cls.update_state = _wrap_update_state(update_state)
    if inspect.isfunction(result):
        cls.result = _wrap_result(result)


@contextlib.contextmanager
def results_of_all_replicas() -> Generator[None]:
    """Lets metrics that are asked in a replica answer for all, at the price of collectives.

    For what a model's own `compute_metrics` makes of results; else each replica answers for itself.
    """
    previous, _active.reports_all = _active.reports_all, True
    try:
        yield
    finally:
        _active.reports_all = previous


def _wrap_result(result: Any) -> Any:
    @functools.wraps(result)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        context = get_replica_context() if _active.reports_all else None
        if context is None or context.num_replicas_in_sync == 1:
            return result(self, *args, **kwargs)
        mapping = [(variable, _of_all_replicas(variable, context)) for variable in self.variables]
        _active.reports_all = False  # the mapping holds for inner metrics too
        try:
            with keras.StatelessScope(mapping):
                return result(self, *args, **kwargs)
        finally:
            _active.reports_all = True

    return wrapped


def _of_all_replicas(variable: Any, context: ReplicaContext) -> Any:
    home = home_of(variable)
    if home is None or home.kind is not VariableKind.ON_READ:
        return variable.value
    stacked = context.communicator.all_gather(jnp.expand_dims(variable.value, 0), 0, None)
    return aggregate_components(stacked, home.aggregation, variable.path)


def _wrap_update_state(update_state: Any) -> Any:
    signature = inspect.signature(update_state)

    @functools.wraps(update_state)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Metrics made of metrics update the inner ones, which then see the rows for themselves.
        if _active.is_updating or _is_container(self):
            return update_state(self, *args, **kwargs)
        _active.is_updating = True
        try:
            context = replica_context() if has_strategy() else None
            if context is not None:
                return _update_in_replica(update_state, signature, self, args, kwargs, context)
            if _counts_once(self):
                return _update_once(update_state, self, args, kwargs)
            return update_state(self, *args, **kwargs)
        finally:
            _active.is_updating = False

    return wrapped


def _is_container(metric: Any) -> bool:
    """Whether a metric only passes values on: it has inner metrics and no state of its own."""
    inner = getattr(metric, "metrics", None)
    return isinstance(inner, list) and not own_variables(metric)


def _update_in_replica(
    update_state: Any, signature: Any, metric: Any, args: Any, kwargs: Any, context: ReplicaContext
) -> Any:
    """Updates this replica's part with true examples only."""
    bound = signature.bind(metric, *args, **kwargs)
    names = list(signature.parameters)
    values = [jnp.asarray(leaf) for leaf in jax.tree.leaves(list(bound.arguments.values())[1:2])]
    has_weight = "sample_weight" in names
    if values and all(value.ndim == 0 for value in values):
        if is_loss_tracker(metric):
            return record_loss(metric, values[0], context)
        if current_mode() is not StepMode.OWN and has_weight:
            weight = bound.arguments.get("sample_weight")
            fraction = example_fraction(context, "float32")
            bound.arguments["sample_weight"] = (
                fraction if weight is None else jnp.asarray(weight, "float32") * fraction
            )
        return update_state(*bound.args, **bound.kwargs)
    if _averages_batches(metric, bound.arguments):
        weight = bound.arguments.get("sample_weight")
        fraction = example_fraction(context, metric.dtype)
        bound.arguments["sample_weight"] = fraction if weight is None else weight * fraction
        if context.batch.is_padded:
            return _update_with_true_rows(update_state, metric, bound, context)
    if not context.batch.is_padded or not values:
        return update_state(*bound.args, **bound.kwargs)
    # A metric of the user's own may take weights and not use them.
    uses_weight = has_weight and type(metric).__module__.startswith("keras.")
    if uses_weight and (mask := row_mask(values[0], context)) is not None:
        weight = bound.arguments.get("sample_weight")
        bound.arguments["sample_weight"] = _mask_weight(weight, mask, metric, bound.arguments)
        return update_state(*bound.args, **bound.kwargs)
    return _update_with_true_rows(update_state, metric, bound, context)


def _averages_batches(metric: Any, arguments: dict[str, Any]) -> bool:
    """Whether a metric makes one number of a batch, such as the mean error of single numbers.

    Keras counts each batch once then; here replicas count their shares of it.
    """
    if not isinstance(metric, keras.metrics.MeanMetricWrapper):
        return False
    weight = arguments.get("sample_weight")
    if weight is not None and jnp.ndim(weight):
        return False
    y_true, y_pred = arguments.get("y_true"), arguments.get("y_pred")
    if getattr(y_true, "ndim", 0) != 1 or getattr(y_pred, "ndim", 0) != 1:
        return False
    return jax.eval_shape(functools.partial(averaged, metric), y_true, y_pred).ndim == 0


def _mask_weight(weight: Any, mask: Any, metric: Any, arguments: dict[str, Any]) -> Any:
    """Combines weights with the true rows, in the shape of a Keras mask if there is one."""
    keras_masks = [get_keras_mask(value) for value in arguments.values()]
    shapes = [keras_mask.shape for keras_mask in keras_masks if keras_mask is not None]
    rows = mask.reshape(-1)
    if weight is None:
        shape = shapes[0] if shapes else rows.shape
        rows = rows.reshape((-1,) + (1,) * (len(shape) - 1))
        return jnp.broadcast_to(rows, shape).astype(metric.dtype)
    weight = jnp.asarray(weight)
    if weight.ndim == 0:
        return rows.astype(weight.dtype) * weight
    return weight * rows.reshape((-1,) + (1,) * (weight.ndim - 1)).astype(weight.dtype)


def _update_with_true_rows(
    update_state: Any, metric: Any, bound: Any, context: ReplicaContext
) -> None:
    """For metrics that may not use weights: runs the update on the true rows alone."""
    lengths = sorted(set(context.batch.lengths or ()))
    variables = metric.variables
    current = [variable.value for variable in variables]

    def branch(length: int) -> Any:
        def update(values: list[Any]) -> list[Any]:
            if length == 0:
                return values
            # One by one: a tree map over a dict returns its keys in another order.
            cut = {
                name: first_rows(value, length, context) for name, value in bound.arguments.items()
            }
            true_rows = inspect.BoundArguments(bound.signature, OrderedDict(cut))
            with keras.StatelessScope(list(zip(variables, values, strict=True))) as scope:
                update_state(*true_rows.args, **true_rows.kwargs)
            return [scope.get_current_value(variable) for variable in variables]

        return update

    index = jnp.searchsorted(jnp.asarray(lengths), context.num_examples)
    updated = jax.lax.switch(index, [branch(length) for length in lengths], current)
    for variable, value in zip(variables, updated, strict=True):
        variable.assign(value)


def _counts_once(metric: Any) -> bool:
    """Whether this is an update for all replicas together, of a metric with a part on each."""
    if get_stateless_scope() is not None:
        return False
    homes = [home_of(variable) for variable in metric.variables]
    return any(home is not None and home.kind is VariableKind.ON_READ for home in homes)


def _update_once(update_state: Any, metric: Any, args: Any, kwargs: Any) -> None:
    variables = metric.variables
    mapping = [(variable, variable.value) for variable in variables]
    with keras.StatelessScope(mapping) as scope:
        update_state(metric, *args, **kwargs)
    for variable in variables:
        value = scope.get_current_value(variable)
        if isinstance(variable, DistributedVariable):
            variable.assign_to_first_component(value)
        else:
            variable.assign(value)
