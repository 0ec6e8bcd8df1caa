"""Methods of models of other libraries, wrapped when a class makes its first model."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import keras

_Function = Callable[..., Any]


def wrapping_methods(wrap: Callable[[_Function], _Function], *names: str) -> _Function:
    """Returns a replacement of `Model.__new__` that wraps methods of each class of models once."""
    wrapped: set[type] = {keras.Model}

    def replace(original: _Function) -> Any:
        def create(cls: type, *args: object, **kwargs: object) -> Any:
            for base in cls.__mro__:
                if issubclass(base, keras.Model) and base not in wrapped:
                    wrapped.add(base)
                    for name in names:
                        method = base.__dict__.get(name)
                        if inspect.isfunction(method):
                            setattr(base, name, wrap(method))
            return original(cls, *args, **kwargs)

        return staticmethod(create)

    return replace
