"""Layers remember the scope that they were made in, for variables that they make later.

`keras.layers.Layer.__new__` and `__call__`, and `build` of `Model` and `Sequential`, are replaced
(Keras 3.12 to 3.15). A model that is filled in a scope and built outside of it, as users of R have
it, belongs to that strategy.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import keras

from stratagem.context import get_strategy, has_strategy

__all__ = ["install", "scope_of"]

_strategies: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def scope_of(layer: Any) -> Any:
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


def install() -> None:
    """Makes layers remember. Done once, on import."""
    original = keras.layers.Layer.__new__

    def create(cls: type, *args: Any, **kwargs: Any) -> Any:
        layer = (
            object.__new__(cls) if original is object.__new__ else original(cls, *args, **kwargs)
        )
        if has_strategy():
            _strategies[layer] = get_strategy()
        return layer

    keras.layers.Layer.__new__ = staticmethod(create)
    keras.layers.Layer.__call__ = _in_scope_until_built(keras.layers.Layer.__call__)
    for kind in (keras.Model, keras.Sequential):
        kind.build = _in_scope_until_built(kind.build)


def _in_scope_until_built(original: Any) -> Any:
    @functools.wraps(original)
    def entered(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.built or has_strategy() or (strategy := scope_of(self)) is None:
            return original(self, *args, **kwargs)
        with strategy.scope():
            return original(self, *args, **kwargs)

    return entered
