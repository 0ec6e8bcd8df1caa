"""Creation of variables: `keras.Variable` in a scope, and `sg.Variable`.

In a scope `keras.Variable` creates a `DistributedVariable`, so that layers, metrics, optimizers and
users need no changes.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import keras

from stratagem.contexts import current_frame, get_strategy, has_strategy
from stratagem.errors import explain
from stratagem.execution.lookups import is_table
from stratagem.keras.patches import patches
from stratagem.keras.private import current_path
from stratagem.keras.variables.requests import (
    IS_SEED,
    VariableRequest,
    annotated,
    as_created,
    as_initializer,
    current_annotations,
    current_source,
)
from stratagem.keras.variables.variable import DistributedVariable
from stratagem.logs import warn_on_one_worker
from stratagem.options import VariableAggregation, VariableSynchronization
from stratagem.variables.layouts import is_remote
from stratagem.variables.registry import (
    Home,
    VariableKind,
    choose_kind,
    home_of,
    parse_aggregation,
    parse_synchronization,
)

if TYPE_CHECKING:
    from jax.typing import DTypeLike

    from stratagem.strategies.strategy import Strategy

# Warning about a Keras distribution that a strategy ignores.

_warned_of: set[str] = set()


def warn_of_other_distribution(strategy: Strategy) -> None:
    """Warns, once per kind, about a Keras distribution that the strategy's scope ignores."""
    distribution = keras.distribution.distribution()
    if distribution is None or (kind := type(distribution).__name__) in _warned_of:
        return
    _warned_of.add(kind)
    warn_on_one_worker(
        explain(
            f"keras.distribution.{kind} is current in the scope of {strategy}, and is ignored.",
            expected="one of both: a strategy places variables and splits batches itself.",
            fix="leave out keras.distribution; for layouts of single variables pass layout_map= to "
            "the strategy.",
            code="SG208",
        ),
        RuntimeWarning,
        stacklevel=2,
    )


# Keras variables on abstract devices: a shape and a dtype, and no value.


class ValuelessVariable(DistributedVariable):
    """A Keras variable created in the scope of a `CompileOnlyStrategy`.

    A read outside of a step draws a new initial value; assignments there are dropped.
    """

    _beginning: Any = None

    @property
    def storage(self) -> Any:
        """The shape of the whole array, in any store."""
        return self.stored

    @storage.setter
    def storage(self, value: object) -> None:
        self.stored = value

    @property
    def for_step(self) -> Any:
        """The shape of the input of a compiled step of the strategy."""
        return self.storage

    @property
    def initializer(self) -> Any:
        """The function that draws an initial value, of a shape and a dtype."""
        return self._beginning or self._initializer

    def settle(self, home: Home, value: Any) -> None:
        """Drops the value of a variable that joins the strategy, and retains its shape.

        `value` is an array, or the initializer of a variable that had no value either.
        """
        has_value = not callable(value)
        self._beginning = as_initializer(value, self._dtype)[0] if has_value else value
        self.store, self.has_rows = None, False  # of the previous strategy
        self._is_table = self._is_table or is_table(self)
        super().settle(home, value)

    def _initialize_with_initializer(self, initializer: object) -> None:
        self._beginning = initializer
        self.find_division()
        self.choose_store()
        self._direct_assign(None)

    def _direct_assign(self, value: object) -> None:
        self._require_own_replica()
        is_stacked = self._home.kind is VariableKind.ON_READ
        replicas = (self._home.strategy.num_replicas_in_sync,) if is_stacked else ()
        dtype = jax.dtypes.canonicalize_dtype(self._dtype)
        self.storage = jax.ShapeDtypeStruct((*replicas, *self._shape), dtype)

    def _global_value(self) -> Any:
        self._require_own_replica()
        return self.initializer(self._shape, dtype=self._dtype)


_SIGNATURE = inspect.signature(DistributedVariable.__init__)


def Variable(  # noqa: N802 - tf.Variable's name
    initial_value: object,
    trainable: bool | None = None,
    name: str | None = None,
    dtype: DTypeLike | None = None,
    synchronization: object = VariableSynchronization.AUTO,
    aggregation: object = VariableAggregation.NONE,
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


@patches(
    keras.Variable,
    "__new__",
    why="layers, metrics and optimizers create distributed variables in a scope",
)
def create_variable(_original: object) -> Any:
    """Returns `keras.Variable.__new__` that creates distributed variables in scopes."""

    def create(cls: type, *args: object, **kwargs: object) -> Any:
        strategy = get_strategy()
        if cls is not keras.Variable or strategy.topology.devices is None:
            return object.__new__(cls)
        warn_of_other_distribution(strategy)
        source, remote = current_source(), strategy.placement.remote
        if source is None and remote is None:
            return object.__new__(_local_class(strategy))
        request = _request(args, kwargs, strategy)
        is_here = request.is_summed or current_annotations().is_worker_local
        kind = _class_of(request, strategy, is_here=is_here)
        if source is None:
            return object.__new__(kind)
        existing = source.existing(request)
        if existing is not None:
            return as_created(existing, request)
        variable = object.__new__(kind)
        source.add(request, variable)
        return variable

    return staticmethod(create)


def _class_of(
    request: VariableRequest, strategy: Strategy, *, is_here: bool
) -> type[DistributedVariable]:
    remote = strategy.placement.remote
    if is_here or remote is None:
        return _local_class(strategy)
    return remote.keras.variable_class(request, strategy)


def _local_class(strategy: Strategy) -> type[DistributedVariable]:
    """Returns the class of variables in this process."""
    has_values = strategy.executor.has_values and not strategy.topology.is_abstract
    return DistributedVariable if has_values else ValuelessVariable


def _request(args: tuple[Any, ...], kwargs: dict[str, Any], strategy: Strategy) -> VariableRequest:
    given = _SIGNATURE.bind_partial(None, *args, **kwargs).arguments
    initializer, shape, dtype = given["initializer"], given.get("shape"), given.get("dtype")
    if not callable(initializer) and not isinstance(initializer, str):
        _, shape, dtype = as_initializer(initializer, dtype)
    name = given.get("name") or "variable"
    synchronization, aggregation = current_annotations().kind or (
        given.get("synchronization", "auto"),
        given.get("aggregation", "none"),
    )
    is_on_read = parse_synchronization(synchronization) is VariableSynchronization.ON_READ
    is_sum = parse_aggregation(aggregation) is VariableAggregation.SUM
    return VariableRequest(
        path="/".join(part for part in (current_path(), name) if part),
        name=name,
        shape=tuple(shape or ()),
        dtype=keras.backend.standardize_dtype(dtype),
        trainable=bool(given.get("trainable", True)),
        is_slot=current_annotations().slot_of is not None,
        has_components=is_on_read and strategy.num_replicas_in_sync > 1,
        is_summed=is_on_read and is_sum,
    )


def adopt(variable: keras.Variable, strategy: Strategy) -> None:
    """Moves a plain Keras variable with a value to a strategy, in place."""
    moved: Any = variable
    aggregation = parse_aggregation(moved.aggregation)
    synchronization = parse_synchronization(moved.synchronization)
    kind = choose_kind(
        synchronization,
        aggregation,
        dtype=moved.dtype,
        num_replicas=strategy.num_replicas_in_sync,
        name=moved.path,
    )
    request = VariableRequest(
        path=moved.path,
        name=moved.name,
        shape=tuple(moved.shape),
        dtype=moved.dtype,
        trainable=moved.trainable,
        is_slot=getattr(moved, "slot_of", None) is not None,
        has_components=kind is VariableKind.ON_READ,
        is_summed=kind is VariableKind.ON_READ and aggregation is VariableAggregation.SUM,
    )
    # Workers have seeds of their own, and the coordinator adds up their counts of metrics.
    is_on_read = synchronization is VariableSynchronization.ON_READ
    is_count = is_on_read and aggregation is VariableAggregation.SUM
    is_seed = getattr(moved, IS_SEED, False)
    is_here = strategy.placement.is_remote and (is_count or is_seed)
    variable_class = _class_of(request, strategy, is_here=is_here)
    # No value is drawn for a strategy that has none: that of a large model takes minutes.
    is_without = issubclass(variable_class, ValuelessVariable)
    both_without = is_without and isinstance(variable, ValuelessVariable)
    value = variable.initializer if both_without else variable.value
    constraint = moved.constraint
    vars(moved).pop("_value", None)
    # Keras has created it, so that only its class can change.
    moved.__class__ = variable_class
    moved.constraint = constraint  # not every class allows one
    moved.settle(Home(strategy, kind, aggregation), value)


class Adoption:
    """A variable on loan to another strategy; `undo` returns it to its own, or to none."""

    def __init__(self, variable: keras.Variable, strategy: Strategy) -> None:
        self._variable: Any = variable
        self._strategy = strategy
        self._class, self._contents = type(variable), dict(vars(variable))
        self._home = home_of(variable)
        adopt(variable, strategy)

    def undo(self) -> None:
        """Restores the variable as it was before."""
        self._strategy.variables.release(self._variable)
        self._variable.__class__ = self._class
        vars(self._variable).clear()
        vars(self._variable).update(self._contents)
        if self._home is not None:
            self._home.strategy.variables.add(self._variable, self._home)


# Layers and optimizers make later variables in the scope of the strategy that they belong to.
#
# A model that is filled in a scope and built outside of it, as users of R have it, belongs to
# that strategy; so do the weights that `quantize` and `enable_lora` add.

_strategies: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def scope_of(layer: object) -> Any:
    """Returns the strategy in whose scope a layer, or the first of its layers, was made.

    Args:
        layer: a layer or a model.

    Returns:
        The strategy; None for what was made outside every scope.
    """
    for one in (layer, *getattr(layer, "layers", ())):
        strategy = _strategies.get(one)
        if strategy is not None:
            return strategy
    return None


@patches(
    keras.layers.Layer,
    "__new__",
    why="a model created in a scope and built outside belongs to the strategy",
)
def created_in_scope(original: Callable[..., Any]) -> Any:
    """Returns `Layer.__new__` that records the strategy in whose scope a layer is created."""

    def create(cls: type, *args: object, **kwargs: object) -> Any:
        layer = (
            object.__new__(cls) if original is object.__new__ else original(cls, *args, **kwargs)
        )
        if has_strategy():
            _strategies[layer] = get_strategy()
        return layer

    return staticmethod(create)


def adopt_new(variables: Iterable[Any], strategy: Strategy) -> None:
    """Moves variables that were made outside every scope to a strategy of which copies are here.

    Args:
        variables: of an optimizer or a metric.
        strategy: of the model that they are for.
    """
    for variable in variables:
        if home_of(variable) is None:
            adopt(variable, strategy)


def _owner(variables: Iterable[Any]) -> Any:
    """The strategy of the first of some variables that has one."""
    homes = (home_of(variable) for variable in variables)
    return next((home.strategy for home in homes if home is not None), None)


@patches(
    keras.layers.Layer,
    "add_weight",
    why="weights that quantize and enable_lora add belong to the layer's strategy",
)
def in_scope_of_layer(original: Callable[..., Any]) -> Any:
    """Returns a method of a layer that runs in the scope of the layer's strategy."""

    def owner_of(layer: keras.layers.Layer, *args: object, **kwargs: object) -> Any:
        return _owner(layer.variables) or _strategies.get(layer)

    return _in_scope_of(original, owner_of)


@patches(
    keras.optimizers.Optimizer,
    "add_variable",
    why="variables added later belong to the strategy of the others",
)
def in_scope_of_slot(original: Callable[..., Any]) -> Any:
    """Returns a method of an optimizer that runs in the scope of the referenced variable."""

    def owner_of(optimizer: keras.optimizers.Optimizer, *args: object, **kwargs: object) -> Any:
        # Without its own variables first: those of a new optimizer have no strategy yet.
        reference = args[0] if args else kwargs.get("reference_variable")
        return _owner([reference, *optimizer.variables])

    return _in_scope_of(original, owner_of)


def _in_scope_of(original: Callable[..., Any], owner_of: Callable[..., Strategy | None]) -> Any:
    @functools.wraps(original)
    def entered(self: object, *args: object, **kwargs: object) -> Any:
        if current_frame() is not None or (strategy := owner_of(self, *args, **kwargs)) is None:
            return original(self, *args, **kwargs)
        with strategy.scope():
            return original(self, *args, **kwargs)

    return entered


def adopt_optimizer(optimizer: keras.optimizers.Optimizer, variables: list[Any]) -> None:
    """Moves an optimizer that is about to be built to the strategy of its variables."""
    if optimizer.built or current_frame() is not None:
        return
    if (strategy := _owner(variables)) is not None:
        adopt_new(optimizer.variables, strategy)


@patches(keras.layers.Layer, "__call__", why="the same as for `__new__`, when it is built")
@patches(keras.Model, "build", why="the same")
@patches(keras.Sequential, "build", why="the same")
def in_scope_until_built(original: Callable[..., Any]) -> Any:
    """Returns a method of a layer that runs in the layer's scope until the layer is built."""

    @functools.wraps(original)
    def entered(self: keras.layers.Layer, *args: object, **kwargs: object) -> Any:
        if self.built or has_strategy() or (strategy := scope_of(self)) is None:
            return original(self, *args, **kwargs)
        with strategy.scope():
            return original(self, *args, **kwargs)

    return entered


# Optimizer slots, each stored where its variable is.


def _of_each_replica(variable: Any) -> contextlib.AbstractContextManager[object]:
    """Annotates slots of replicas that train apart: each has its own, and files their mean."""
    home = home_of(variable)
    is_float = jnp.issubdtype(jnp.dtype(variable.dtype), jnp.floating)
    if home is None or home.strategy.islands is None or not is_float:
        return contextlib.nullcontext()
    return annotated(kind=("on_read", "mean"))


@patches(
    keras.optimizers.Optimizer,
    "add_variable_from_reference",
    why="a slot is stored where its variable is, and belongs to the strategy of its variable",
)
def slot_of_variable(original: Callable[..., Any]) -> Any:
    """Returns `Optimizer.add_variable_from_reference` whose slots reference their variables."""

    def add(
        self: keras.optimizers.Optimizer,
        reference_variable: keras.Variable,
        name: object = None,
        *args: object,
        **kwargs: object,
    ) -> Any:
        def create() -> Any:
            return original(self, reference_variable, name, *args, **kwargs)

        with annotated(slot_of=reference_variable):
            if is_remote(reference_variable):
                remote = reference_variable.distribute_strategy.placement.remote
                return remote.keras.create_slot(self, reference_variable, name, create)
            with _of_each_replica(reference_variable):
                made = create()
        made.slot_of = reference_variable  # It may join a strategy later.
        return made

    return in_scope_of_slot(add)
