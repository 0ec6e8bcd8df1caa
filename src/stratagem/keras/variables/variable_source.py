"""Sources of variables for functions that are called again: each call reuses the first's.

While a source is set, `keras.Variable(...)` in a scope asks it before it creates a variable.
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
    """Description of a variable before it is created.

    Args:
        path: its future path.
        shape: its shape.
        dtype: its dtype.
        trainable: initial value of `trainable`; its layer may change it later.
        is_summed: True for a metric's variable: one component per replica, summed on read.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    is_summed: bool


class VariableSource(Protocol):
    """Decides if a requested variable exists already."""

    def existing(self, request: VariableRequest) -> keras.Variable | None:
        """Returns the existing variable for a request; None to create one."""
        ...

    def add(self, request: VariableRequest, variable: keras.Variable) -> None:
        """Takes a new variable, which has no attributes yet."""
        ...


# Replicas that run eagerly each have a thread, which starts with a copy of these.
_source: contextvars.ContextVar[VariableSource | None] = contextvars.ContextVar(
    "variable_source", default=None
)


def current_source() -> VariableSource | None:
    """Returns the current source of variables; None outside every `variables_from`."""
    return _source.get()


@contextlib.contextmanager
def variables_from(source: VariableSource | None) -> Generator[None]:
    """Uses a source for variables created in a `with` block; None creates them all."""
    token = _source.set(source)
    try:
        yield
    finally:
        _source.reset(token)


def as_created(variable: Any, request: VariableRequest) -> Any:
    """Prepares an existing variable to be returned by `__new__`: `__init__` then does nothing.

    Python calls `__init__` again on it; that one call is ignored.
    """
    variable.trainable = request.trainable  # Another call may have frozen the layer.
    variable.__class__ = _class_without_init(type(variable))
    return variable


@functools.cache
def _class_without_init(cls: type) -> type:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        self.__class__ = cls

    return type(cls.__name__, (cls,), {"__init__": __init__})
