"""Metrics over replicas: each replica updates its part; results cover all replicas.

`update_state` and `result` of each metric class are wrapped once, when its first object is created
or unpickled; subclassing `Metric` is enough. A class of the script is pickled with its wrapped
methods, so these refer only to functions of this module.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Generator
from typing import Any

import jax
import jax.numpy as jnp
import keras

from stratagem.contexts import has_strategy
from stratagem.execution.context.replica import get_replica_context
from stratagem.keras.numerics.metric_updates import (
    of_all_replicas,
    require_counts,
    update_in_replica,
    variables_of_update,
)
from stratagem.keras.numerics.step_mode import replica_context, shares_batches
from stratagem.keras.numerics.step_terms import is_analyzing
from stratagem.keras.private import get_stateless_scope
from stratagem.keras.private.variables import own_variables
from stratagem.keras.variables.annotations import making_state_of_metric
from stratagem.keras.variables.variable import DistributedVariable
from stratagem.variables.kind import VariableKind
from stratagem.variables.registry import home_of

_WRAPPED = "_stratagem_wrapped"

_wrapped_classes: set[type] = {keras.metrics.Metric}


class _Active(threading.local):
    is_updating = False
    reported: dict[int, Any] | None = None


_active = _Active()


def wrapping_class(original: Callable[..., Any]) -> Any:
    """Returns `Metric.__new__` that wraps the methods of each metric class once."""

    def create(cls: type, *args: object, **kwargs: object) -> Any:
        for base in cls.__mro__:
            if issubclass(base, keras.metrics.Metric) and base not in _wrapped_classes:
                _wrap_class(base)
        return object.__new__(cls) if original is object.__new__ else original(cls, *args, **kwargs)

    return staticmethod(create)


def created_once(original: Callable[..., Any]) -> Any:
    """Returns `Metric.add_variable` whose initial value counts once, not once per replica."""

    @functools.wraps(original)
    def add_variable(self: keras.metrics.Metric, *args: object, **kwargs: object) -> Any:
        with making_state_of_metric():
            return original(self, *args, **kwargs)

    return add_variable


def _wrap_class(cls: type) -> None:
    _wrapped_classes.add(cls)
    for name, call in (("update_state", _update_state), ("result", _result)):
        method = cls.__dict__.get(name)
        # A class that was pickled in another process has wrapped methods already.
        if inspect.isfunction(method) and not hasattr(method, _WRAPPED):
            setattr(cls, name, _wrapping(method, call))


def _wrapping(method: Callable[..., Any], call: Callable[..., Any]) -> Any:
    @functools.wraps(method)
    def wrapped(self: keras.metrics.Metric, *args: object, **kwargs: object) -> Any:
        return call(method, self, args, kwargs)

    setattr(wrapped, _WRAPPED, True)
    return wrapped


@contextlib.contextmanager
def results_of_all_replicas() -> Generator[dict[int, Any]]:
    """Makes metric results in a replica cover all replicas, which costs collectives.

    For logs computed by the model's own code; otherwise each replica reports its own result. Yields
    a dict, which fills as results are requested: from ids of their arrays to these, the metric, and
    the place of the array in its result.
    """
    previous, _active.reported = _active.reported, {}
    try:
        yield _active.reported
    finally:
        _active.reported = previous


def _result(
    result: Callable[..., Any],
    metric: keras.metrics.Metric,
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> Any:
    reported, context = _active.reported, get_replica_context()
    if reported is None or context is None:
        return result(metric, *args, **kwargs)
    mapping: list[tuple[Any, Any]] = []
    if context.num_replicas_in_sync > 1:
        mapping = [(one, of_all_replicas(one, context)) for one in metric.variables]
    _active.reported = None  # The mapping covers inner metrics too.
    try:
        with keras.StatelessScope(mapping) if mapping else contextlib.nullcontext():
            results = result(metric, *args, **kwargs)
    finally:
        _active.reported = reported
    if is_analyzing():  # of all replicas: it does not grow with the rows of this one
        ones = lambda leaf: jnp.ones(jnp.shape(leaf), jnp.result_type(leaf))  # noqa: E731
        results = jax.tree.map(ones, results)
    leaves = enumerate(jax.tree.leaves(results))
    reported.update((id(leaf), (leaf, metric, place)) for place, leaf in leaves)
    return results


def _update_state(
    update_state: Callable[..., Any],
    metric: keras.metrics.Metric,
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> Any:
    # A container updates its inner metrics, which then see the rows themselves.
    if _active.is_updating or _is_container(metric):
        return update_state(metric, *args, **kwargs)
    _active.is_updating = True
    try:
        if has_strategy() and get_replica_context() is not None:
            require_counts(update_state, metric, args, kwargs)
        context = replica_context() if has_strategy() else None
        if context is None and has_strategy() and shares_batches():
            context = get_replica_context()
        if context is not None:
            return update_in_replica(update_state, metric, args, kwargs, context)
        if has_strategy() and get_stateless_scope() is None:
            variables_of_update(update_state, metric, args, kwargs)
        if _counts_once(metric):
            return _update_once(update_state, metric, args, kwargs)
        return update_state(metric, *args, **kwargs)
    finally:
        _active.is_updating = False


def _is_container(metric: keras.metrics.Metric) -> bool:
    """Returns True if a metric has inner metrics and no state, so that it only forwards values."""
    inner = getattr(metric, "metrics", None)
    return isinstance(inner, list) and not own_variables(metric)


def _counts_once(metric: keras.metrics.Metric) -> bool:
    """Returns True for an update outside replicas of a metric with a component on each."""
    if get_stateless_scope() is not None:
        return False
    homes = [home_of(variable) for variable in metric.variables]
    return any(home is not None and home.kind is VariableKind.ON_READ for home in homes)


def _update_once(
    update_state: Callable[..., Any],
    metric: keras.metrics.Metric,
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> None:
    variables = variables_of_update(update_state, metric, args, kwargs)
    mapping = [(variable, variable.value) for variable in variables]
    with keras.StatelessScope(mapping) as scope:
        update_state(metric, *args, **kwargs)
    for variable in variables:
        value = scope.get_current_value(variable)
        if isinstance(variable, DistributedVariable):
            variable.assign_to_first_component(value)
        else:
            variable.assign(value)
