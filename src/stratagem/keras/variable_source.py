"""Where a function that is called again and again gets its variables from: those of its first call.

While a source is set, `keras.Variable(...)` in a scope asks it before it makes a variable.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Generator
from typing import Any, Protocol

import keras

__all__ = [
    "VariableRequest",
    "VariableSource",
    "as_created",
    "current_source",
    "variables_from",
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class VariableRequest:
    """What is known of a variable before it is made.

    Args:
        path: the path that it gets.
        shape: its shape.
        dtype: its dtype.
        trainable: whether it is trained, unless its layer is told otherwise later.
        is_collected: whether it is one of a metric: a part on each replica, added up when read.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    is_collected: bool


class VariableSource(Protocol):
    """Decides whether a variable that is asked for is one that exists."""

    def existing(self, request: VariableRequest) -> keras.Variable | None:
        """Returns the variable to hand out; None to have one made.

        Args:
            request: what is asked for.
        """
        ...

    def add(self, request: VariableRequest, variable: keras.Variable) -> None:
        """Takes a new variable, which has no attributes yet.

        Args:
            request: what was asked for.
            variable: the variable.
        """
        ...


# Replicas that run op by op have a thread each, which begins with a copy of these.
_source: contextvars.ContextVar[VariableSource | None] = contextvars.ContextVar(
    "variable_source", default=None
)


def current_source() -> VariableSource | None:
    """Returns what new variables are asked for; None outside every `variables_from`."""
    return _source.get()


@contextlib.contextmanager
def variables_from(source: VariableSource | None) -> Generator[None]:
    """Asks a source for the variables that are created in a `with` block.

    Args:
        source: the source; None has them made.
    """
    token = _source.set(source)
    try:
        yield
    finally:
        _source.reset(token)


def as_created(variable: Any, request: VariableRequest) -> Any:
    """Lets `__new__` return a variable that exists: Python calls its `__init__` once more.

    Args:
        variable: of a strategy.
        request: what was asked for.

    Returns:
        The variable, which takes this one call without being changed by it.
    """
    variable.trainable = request.trainable  # a layer may have been frozen in another call
    variable.__class__ = _class_without_init(type(variable))
    return variable


@functools.cache
def _class_without_init(cls: type) -> type:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        self.__class__ = cls

    return type(cls.__name__, (cls,), {"__init__": __init__})
