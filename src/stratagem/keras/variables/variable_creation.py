"""Creation of variables: `keras.Variable` in a scope, and `sg.Variable`.

`keras.Variable.__new__` is replaced (Keras 3.12 to 3.15): in a scope it creates a
`DistributedVariable`, so that layers, metrics, optimizers and users need no changes.
"""

from __future__ import annotations

import inspect
from typing import Any

import keras

from stratagem.context import get_strategy
from stratagem.context.function_trace import current_function_trace
from stratagem.execution import current_scope
from stratagem.keras.private import current_path
from stratagem.keras.variables.annotations import current_annotations, is_making_worker_local
from stratagem.keras.variables.initial_value import as_initializer
from stratagem.keras.variables.other_distribution import warn_of_other_distribution
from stratagem.keras.variables.valueless_variable import ValuelessVariable
from stratagem.keras.variables.variable import DistributedVariable
from stratagem.keras.variables.variable_source import VariableRequest, as_created, current_source
from stratagem.messages import explain
from stratagem.options import VariableAggregation, VariableSynchronization
from stratagem.variables import Home, choose_kind, parse_aggregation, parse_synchronization

__all__ = ["Variable", "adopt", "install"]

_SIGNATURE = inspect.signature(DistributedVariable.__init__)


def Variable(  # noqa: N802 - tf.Variable's name
    initial_value: Any,
    trainable: bool | None = None,
    name: str | None = None,
    dtype: Any = None,
    synchronization: Any = VariableSynchronization.AUTO,
    aggregation: Any = VariableAggregation.NONE,
) -> keras.Variable:
    """Creates a Keras variable with `tf.Variable`'s argument order. Call anywhere.

    In a replica function it is created on the first call and reused afterwards, if the function
    stores it.

    Args:
        initial_value: array, number, or a function without arguments that returns one.
        trainable: None for True, or for False with synchronization ON_READ.
        name: name of the variable.
        dtype: dtype; None for the dtype of the value.
        synchronization: when the copies are synchronized.
        aggregation: how the replicas' contributions are combined.

    Returns:
        A variable of the current strategy.

    Raises:
        ValueError: annotations that make no sense with several replicas.

    Example:
        >>> sg.Variable(10.0, aggregation=sg.VariableAggregation.SUM).aggregation
        'sum'

    Source: TF 2.21 variables.py, Variable.
    """
    parsed = parse_synchronization(synchronization)
    if trainable is None:
        trainable = parsed is not VariableSynchronization.ON_READ
    value = initial_value() if callable(initial_value) else initial_value
    initializer, shape, dtype = as_initializer(value, dtype)
    return keras.Variable(
        initializer,
        shape=shape,
        dtype=dtype,
        trainable=trainable,
        name=name,
        synchronization=parsed.name.lower(),
        aggregation=parse_aggregation(aggregation).name.lower(),
    )


def install() -> None:
    """Makes `keras.Variable` create distributed variables in scopes. Runs once, on import."""

    def create(cls: type, *args: Any, **kwargs: Any) -> Any:
        if current_function_trace() is not None and current_scope() is None:
            raise ValueError(
                explain(
                    "A variable was created in an sg.function, in cross-replica context.",
                    expected="variables that are there before it is called, or that a replica "
                    "function creates on its first call.",
                    fix="create models, optimizers and metrics outside the function.",
                )
            )
        strategy = get_strategy()
        if cls is not keras.Variable or strategy.topology.devices is None:
            return object.__new__(cls)
        warn_of_other_distribution(strategy)
        is_summed = _is_summed(*_annotations(args, kwargs))
        kind = _class_of(strategy, is_worker_local=is_summed or is_making_worker_local())
        source = current_source()
        if source is None:
            return object.__new__(kind)
        request = _request(args, kwargs, is_summed=is_summed)
        existing = source.existing(request)
        if existing is not None:
            return as_created(existing, request)
        variable = object.__new__(kind)
        source.add(request, variable)
        return variable

    keras.Variable.__new__ = staticmethod(create)


def _class_of(strategy: Any, *, is_worker_local: bool) -> type[DistributedVariable]:
    """Returns the class of a new variable."""
    remote = strategy.placement.remote
    if remote is not None and not is_worker_local:
        return remote.keras.variable_class(is_all_remote=strategy.placement.is_remote)
    has_values = strategy.executor.has_values and not strategy.topology.is_abstract
    return DistributedVariable if has_values else ValuelessVariable


def _is_summed(synchronization: Any, aggregation: Any) -> bool:
    """Returns True for one component per replica, summed on read, like a metric's."""
    on_read = parse_synchronization(synchronization) is VariableSynchronization.ON_READ
    return on_read and parse_aggregation(aggregation) is VariableAggregation.SUM


def _request(args: tuple[Any, ...], kwargs: dict[str, Any], *, is_summed: bool) -> VariableRequest:
    told = _SIGNATURE.bind_partial(None, *args, **kwargs).arguments
    initializer, shape, dtype = told["initializer"], told.get("shape"), told.get("dtype")
    if not callable(initializer) and not isinstance(initializer, str):
        _, shape, dtype = as_initializer(initializer, dtype)
    path = "/".join(part for part in (current_path(), told.get("name") or "variable") if part)
    return VariableRequest(
        path=path,
        shape=tuple(shape or ()),
        dtype=keras.backend.standardize_dtype(dtype),
        trainable=bool(told.get("trainable", True)),
        is_summed=is_summed,
    )


def _annotations(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    annotations = current_annotations()
    if annotations is not None:
        return annotations
    told = _SIGNATURE.bind_partial(None, *args, **kwargs).arguments
    return told.get("synchronization", "auto"), told.get("aggregation", "none")


def adopt(variable: keras.Variable, strategy: Any) -> None:
    """Moves a plain Keras variable with a value to a strategy, in place."""
    moved: Any = variable
    value = moved.value
    aggregation = parse_aggregation(moved.aggregation)
    synchronization = parse_synchronization(moved.synchronization)
    kind = choose_kind(
        synchronization,
        aggregation,
        dtype=moved.dtype,
        num_replicas=strategy.num_replicas_in_sync,
        name=moved.path,
    )
    vars(moved).pop("_value", None)
    moved.__class__ = _class_of(strategy, is_worker_local=strategy.placement.is_remote)
    moved.settle(Home(strategy, kind, aggregation), value)
