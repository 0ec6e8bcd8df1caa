"""Metrics over replicas: each replica updates its part; results cover all replicas.

`update_state` and `result` of each metric class are wrapped once, when its first object is created
or unpickled; subclassing `Metric` is enough. A class of the script is pickled with its wrapped
methods, so these refer only to functions of this module.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections import OrderedDict
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, cast

import jax
import jax.numpy as jnp
import keras

from stratagem.contexts import get_strategy, has_strategy
from stratagem.errors import explain, invalid
from stratagem.execution.replica_context import ReplicaContext, get_replica_context
from stratagem.execution.row_effects import RowEffect, adds_to_inputs, row_effects
from stratagem.keras.numerics.layers import (
    first_rows,
    gathered_rows,
    num_rows,
    whole_batch,
)
from stratagem.keras.numerics.step_mode import (
    StepMode,
    batch_fraction,
    current_mode,
    in_step,
    is_analyzing,
    is_loss_tracker,
    record_loss,
    replica_context,
    shares_batches,
    step_mode,
    step_state,
    terms_of,
)
from stratagem.keras.patches import patches
from stratagem.keras.private import averaged, averaged_function, get_stateless_scope, own_variables
from stratagem.keras.variables.requests import annotated
from stratagem.keras.variables.variable import DistributedVariable
from stratagem.options import VariableAggregation
from stratagem.variables.components import aggregate_components
from stratagem.variables.registry import VariableKind, home_of, is_on_read

if TYPE_CHECKING:
    from jax.typing import ArrayLike

# Analysis of losses: per-row values, sums or means over the rows of the batch.

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


# Metric updates in a replica, so that the result over all replicas matches a single device.
#
# A metric that adds up over rows is updated with this replica's rows. Any other metric is updated
# on each replica with the rows of all, and counted on replica 0. Keras's own metrics add up; for
# others, the operations of their update are analyzed. In a custom step (`strategy.run`) each
# replica
# updates its part with its rows, as in TensorFlow.

# Metrics whose first update was tried: it creates variables in some of them.
_tried: weakref.WeakSet[Any] = weakref.WeakSet()
_ADDITIVE = {RowEffect.INPUT, RowEffect.INPUT_PLUS_SUM}


class MetricUpdate:
    """A call of a metric's `update_state`."""

    def __init__(
        self,
        update_state: Callable[..., Any],
        metric: keras.metrics.Metric,
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> None:
        self._update_state, self._metric = update_state, metric
        self._args, self._kwargs = args, kwargs
        self._is_of_keras = is_of_keras(update_state)

    @functools.cached_property
    def _bound(self) -> inspect.BoundArguments:
        """The arguments by name, which may be replaced."""
        return inspect.signature(self._update_state).bind(self._metric, *self._args, **self._kwargs)

    @property
    def _given(self) -> dict[str, Any]:
        """The arguments by name, without the metric."""
        return dict(list(self._bound.arguments.items())[1:])

    def run(self) -> Any:
        """Updates the metric as Keras does."""
        return self._update_state(self._metric, *self._args, **self._kwargs)

    def _run_bound(self) -> Any:
        return self._update_state(*self._bound.args, **self._bound.kwargs)

    def variables(self) -> list[Any]:
        """Returns the metric's variables, including those that its first update creates."""
        if self._metric not in _tried:
            _tried.add(self._metric)
            with keras.StatelessScope():
                self.run()
        return self._metric.variables

    def _values_after(
        self, variables: list[Any], values: list[Any], arguments: dict[str, Any]
    ) -> list[Any]:
        """Returns the values of variables after an update from other values."""
        # Not a tree map, which would return the keys of the dict in another order.
        first = next(iter(self._bound.arguments))
        everything = OrderedDict({first: self._metric} | arguments)
        call = inspect.BoundArguments(self._bound.signature, everything)
        with step_mode(StepMode.WHOLE):
            return _values_after(
                lambda: self._update_state(*call.args, **call.kwargs), variables, values
            )

    def in_replica(self, context: ReplicaContext) -> Any:
        """Updates the metric with one replica's arguments, true examples only."""
        self._check_homes(context)
        values = jax.tree.leaves(list(self._bound.arguments.values())[1:2])
        is_empty = not self._metric.variables and not self._is_of_keras  # Hides inner metrics.
        if not values or is_empty:
            return self._run_bound()
        if all(jnp.ndim(value) == 0 for value in values):
            return self._with_scalar(values[0], context)
        rows = num_rows(values[0], context)
        if rows is None:
            return self._run_bound()
        if current_mode() is StepMode.OWN:
            if self._averages_batches():
                self._weigh_by_examples(context)
        elif not self._adds_up(rows):
            return self._with_whole_batch(context, rows)
        return self._with_true_rows(context, rows)

    def _with_scalar(self, value: ArrayLike, context: ReplicaContext) -> Any:
        """Updates the metric with one number that each replica computed from its examples."""
        if is_loss_tracker(self._metric):
            return record_loss(cast("keras.metrics.Mean", self._metric), value, context)
        if current_mode() is StepMode.OWN:
            return self._run_bound()
        arguments = self._bound.arguments
        if isinstance(value, jax.Array):
            first = list(arguments)[1]
            arguments[first] = terms_of([arguments[first]], context)[0]
        if not self._is_of_keras or "sample_weight" not in self._bound.signature.parameters:
            return self._with_whole_batch(context, None)
        weight = arguments.get("sample_weight")
        if isinstance(weight, int) and weight == context.batch.size:  # Set by Keras.
            arguments["sample_weight"] = jnp.asarray(context.num_examples, self._metric.dtype)
        else:
            self._weigh_by_examples(context)
        return self._run_bound()

    def _weigh_by_examples(self, context: ReplicaContext) -> None:
        """Weights one number per batch by this replica's fraction of the examples."""
        arguments, dtype = self._bound.arguments, self._metric.dtype
        weight = arguments.get("sample_weight")
        fraction = batch_fraction(context, dtype)
        whole = fraction if weight is None else jnp.asarray(weight, dtype) * fraction
        arguments["sample_weight"] = whole

    def _averages_batches(self) -> bool:
        """Returns True if the metric averages one number per batch, such as a mean over rows."""
        if not isinstance(self._metric, keras.metrics.MeanMetricWrapper):
            return False
        weight = self._bound.arguments.get("sample_weight")
        if weight is not None and jnp.ndim(weight):
            return False
        return self._averaged_shape(self._metric) == ()

    def _averaged_shape(self, metric: keras.metrics.MeanMetricWrapper) -> tuple[int, ...]:
        pair = [jnp.asarray(self._bound.arguments[name]) for name in ("y_true", "y_pred")]

        def values(y_true: jax.Array, y_pred: jax.Array) -> Any:
            return keras.ops.convert_to_tensor(averaged(metric, y_true, y_pred))

        with step_mode(StepMode.WHOLE):
            return jax.eval_shape(values, *pair).shape

    def _adds_up(self, rows: int) -> bool:
        """Returns True if the update adds a sum over rows, so that replicas can sum their parts."""
        if any(home.kind is not VariableKind.ON_READ for home in self._homes()):
            return True  # No components to count on one replica.
        if self._is_of_keras:
            if not isinstance(self._metric, keras.metrics.MeanMetricWrapper):
                return True
            if is_by_rows(averaged_function(self._metric)):
                # Without another axis it reduces the rows.
                has_axis = jnp.ndim(self._bound.arguments["y_pred"]) > 1
                return has_axis and self._averaged_shape(self._metric) != ()
        return self._is_seen_to_add_up(rows)

    def _check_homes(self, context: ReplicaContext) -> None:
        if any(home is None for home in self._homes()):
            raise invalid(
                f"The metric {self._metric.name!r} was created outside the scope of a strategy, "
                f"but a replica function of {context.strategy} updates it.",
                expected="a metric with variables on each replica.",
                fix=f"create {type(self._metric).__name__}(...) in `with strategy.scope():`.",
                code="SG201",
            )

    def _homes(self) -> list[Any]:
        return [home_of(variable) for variable in self._metric.variables]

    def _is_seen_to_add_up(self, rows: int) -> bool:
        variables = self._metric.variables
        given = self._given
        leaves, structure = jax.tree.flatten([*given.values()])
        has_rows = [
            isinstance(leaf, jax.Array) and leaf.ndim > 0 and leaf.shape[0] == rows
            for leaf in leaves
        ]
        pairs = list(zip(has_rows, leaves, strict=True))

        def update(state: list[Any], with_rows: list[Any]) -> list[Any]:
            remaining = iter(with_rows)
            own = [next(remaining) if one else leaf for one, leaf in pairs]
            arguments = dict(zip(given, structure.unflatten(own), strict=True))
            return self._values_after(variables, state, arguments)

        state = [variable.value for variable in variables]
        effects = row_effects(update, state, [leaf for one, leaf in pairs if one], rows)
        return effects is not None and all(effect in _ADDITIVE for effect in effects)

    def require_counts(self) -> None:
        """Raises a NotImplementedError if a worker cannot update the metric from zero.

        Workers of a coordinator start from zero in each function, and it adds up what they count.
        """
        remote: Any = get_strategy().placement.remote
        if not getattr(remote, "counts_from_zero", False) or self._is_of_keras:
            return
        variables, given = self.variables(), self._given

        def update(state: list[Any]) -> list[Any]:
            return self._values_after(variables, state, given)

        if not adds_to_inputs(update, [variable.value for variable in variables]):
            raise NotImplementedError(
                explain(
                    f"The metric {self._metric.name!r} does not add to its state, but workers of "
                    "parameter servers count apart, each from zero.",
                    expected="an update_state that adds to each variable a number that the "
                    "variable does not change: no maximum, and no average of earlier values.",
                    fix="sum what the result is computed from, or evaluate under another strategy.",
                )
            )

    def _with_whole_batch(self, context: ReplicaContext, rows: int | None) -> None:
        """Updates with the rows and the state of all replicas, and counts on replica 0."""
        arguments = {
            name: gathered_rows(value, context, rows) for name, value in self._given.items()
        }
        variables = self.variables()
        state = [of_all_replicas(variable, context) for variable in variables]
        with whole_batch(context):
            values = self._values_after(variables, state, arguments)
        is_first = context.replica_id_in_sync_group == 0
        for variable, value in zip(variables, values, strict=True):
            home = home_of(variable)
            if home is not None and home.aggregation is VariableAggregation.SUM:
                value = jnp.where(is_first, value, jnp.zeros_like(value))
            variable.assign(value)

    def _with_true_rows(self, context: ReplicaContext, rows: int) -> Any:
        """Updates with this replica's true rows, with one branch per number of rows."""
        if not context.batch.is_padded:
            return self._run_bound()
        if isinstance(context.num_examples, int):  # Eager replicas have no padding.
            return self._run_bound() if context.num_examples else None
        lengths = sorted(set(context.batch.lengths or ()))
        variables = self.variables()

        def branch(length: int) -> Any:
            def update(values: list[Any]) -> list[Any]:
                if length == 0:
                    return values
                arguments = {
                    name: first_rows(value, length, context, rows)
                    for name, value in self._given.items()
                }
                return self._values_after(variables, values, arguments)

            return update

        index = jnp.searchsorted(jnp.asarray(lengths), context.num_examples)
        current = [variable.value for variable in variables]
        updated = jax.lax.switch(index, [branch(length) for length in lengths], current)
        for variable, value in zip(variables, updated, strict=True):
            variable.assign(value)
        return None

    def once(self) -> None:
        """Updates, outside replicas, a metric with a component on each; it counts once."""
        variables = self.variables()
        values = _values_after(self.run, variables, [variable.value for variable in variables])
        for variable, value in zip(variables, values, strict=True):
            if isinstance(variable, DistributedVariable):
                variable.assign_to_first_component(value)
            else:
                variable.assign(value)


def _values_after(
    update: Callable[[], object], variables: list[Any], values: list[Any]
) -> list[Any]:
    """Returns the values of variables after an update from other values, which changes nothing."""
    # Of these variables only: what an update does to others is not a metric's state.
    with keras.StatelessScope(list(zip(variables, values, strict=True))) as scope:
        update()
    return [scope.get_current_value(variable) for variable in variables]


def of_all_replicas(variable: keras.Variable, context: ReplicaContext) -> Any:
    """Returns a variable's value over all components; a collective, so call on every replica."""
    home = home_of(variable)
    if home is None or home.kind is not VariableKind.ON_READ:
        return variable.value
    stacked = context.communicator.all_gather(jnp.expand_dims(variable.value, 0), 0, None)
    return aggregate_components(stacked, home.aggregation, variable.path)


_WRAPPED = "_stratagem_wrapped"

_wrapped_classes: set[type] = {keras.metrics.Metric}


@patches(
    keras.metrics.Metric,
    "__new__",
    why="update_state counts true examples; result combines all replicas",
)
def wrapping_class(original: Callable[..., Any]) -> Any:
    """Returns `Metric.__new__` that wraps the methods of each metric class once."""

    def create(cls: type, *args: object, **kwargs: object) -> Any:
        for base in cls.__mro__:
            if issubclass(base, keras.metrics.Metric) and base not in _wrapped_classes:
                _wrap_class(base)
        return object.__new__(cls) if original is object.__new__ else original(cls, *args, **kwargs)

    return staticmethod(create)


@patches(
    keras.metrics.Metric,
    "add_variable",
    why="an initial value counts once, not once per replica",
)
def created_once(original: Callable[..., Any]) -> Any:
    """Returns `Metric.add_variable` whose initial value counts once, not once per replica."""

    @functools.wraps(original)
    def add_variable(self: keras.metrics.Metric, *args: object, **kwargs: object) -> Any:
        with annotated(is_of_metric=True):
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
    reported: dict[int, Any] = {}
    with in_step(reported=reported):
        yield reported


def _result(
    result: Callable[..., Any],
    metric: keras.metrics.Metric,
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> Any:
    reported, context = step_state().reported, get_replica_context()
    if reported is None or context is None:
        return result(metric, *args, **kwargs)
    mapping: list[tuple[Any, Any]] = []
    if context.num_replicas_in_sync > 1:
        mapping = [(one, of_all_replicas(one, context)) for one in metric.variables]
    mapped = keras.StatelessScope(mapping) if mapping else contextlib.nullcontext()
    with in_step(reported=None), mapped:  # the mapping covers inner metrics too
        results = result(metric, *args, **kwargs)
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
    if step_state().updates_metric or _is_container(metric):
        return update_state(metric, *args, **kwargs)
    update = MetricUpdate(update_state, metric, args, kwargs)
    with in_step(updates_metric=True):
        if not has_strategy():
            return update.once() if _counts_once(metric) else update.run()
        if get_replica_context() is not None:
            update.require_counts()
        context = replica_context()
        if context is None and shares_batches():
            context = get_replica_context()
        if context is not None:
            return update.in_replica(context)
        if get_stateless_scope() is None:
            update.variables()
        return update.once() if _counts_once(metric) else update.run()


def _is_container(metric: keras.metrics.Metric) -> bool:
    """Returns True if a metric has inner metrics and no state, so that it only forwards values."""
    inner = getattr(metric, "metrics", None)
    return isinstance(inner, list) and not own_variables(metric)


def _counts_once(metric: keras.metrics.Metric) -> bool:
    """Returns True for an update outside replicas of a metric with a component on each."""
    if get_stateless_scope() is not None:
        return False
    return any(map(is_on_read, metric.variables))
