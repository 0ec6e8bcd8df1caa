"""Layers and optimizers make later variables in the scope of the strategy that they belong to.

A model that is filled in a scope and built outside of it, as users of R have it, belongs to
that strategy; so do the weights that `quantize` and `enable_lora` add.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from stratagem.contexts import current_frame, get_strategy, has_strategy
from stratagem.keras.variables.variable_creation import adopt
from stratagem.variables.registry import home_of

if TYPE_CHECKING:
    import keras

    from stratagem.strategies.base.strategy import Strategy


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


def in_scope_of_layer(original: Callable[..., Any]) -> Any:
    """Returns a method of a layer that runs in the scope of the layer's strategy."""

    def owner_of(layer: keras.layers.Layer, *args: object, **kwargs: object) -> Any:
        return _owner(layer.variables) or _strategies.get(layer)

    return _in_scope_of(original, owner_of)


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


def adopting(original: Callable[..., Any]) -> Any:
    """Returns `Optimizer.build` that moves the optimizer to the strategy of its variables."""

    @functools.wraps(original)
    def build(self: keras.optimizers.Optimizer, variables: Iterable[keras.Variable]) -> Any:
        variables = list(variables)
        if (
            not self.built
            and current_frame() is None
            and (strategy := _owner(variables)) is not None
        ):
            adopt_new(self.variables, strategy)
        return original(self, variables)

    return build


def in_scope_until_built(original: Callable[..., Any]) -> Any:
    """Returns a method of a layer that runs in the layer's scope until the layer is built."""

    @functools.wraps(original)
    def entered(self: keras.layers.Layer, *args: object, **kwargs: object) -> Any:
        if self.built or has_strategy() or (strategy := scope_of(self)) is None:
            return original(self, *args, **kwargs)
        with strategy.scope():
            return original(self, *args, **kwargs)

    return entered
