"""Sources of variables for functions that are called again: each call reuses the first's.

While a source is set, `keras.Variable(...)` in a scope asks it before it creates a variable.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Generator
from typing import Any, Protocol

import keras


@dataclasses.dataclass(frozen=True, kw_only=True)
class VariableRequest:
    """Description of a variable before it is created.

    Args:
        path: its future path.
        name: the last part of the path.
        shape: its shape.
        dtype: its dtype.
        trainable: initial value of `trainable`; its layer may change it later.
        is_slot: True for an optimizer's slot of a variable.
        has_components: True for one component per replica.
        is_summed: True for a metric's variable, whose components are summed on read.
    """

    path: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    is_slot: bool
    has_components: bool
    is_summed: bool

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)


class VariableSource(Protocol):
    """Decides if a requested variable exists already."""

    def existing(self, request: VariableRequest) -> keras.Variable | None:
        """Returns the existing variable for a request; None to create one."""
        ...

    def add(self, request: VariableRequest, variable: keras.Variable) -> None:
        """Takes a new variable, which has no attributes yet."""
        ...


_IS_AGAIN = "_stratagem_is_created_again"

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


def as_created(variable: keras.Variable, request: VariableRequest) -> Any:
    """Prepares an existing variable to be returned by `__new__`.

    Python calls `__init__` on it again; `is_initialized` makes that one call do nothing.
    """
    variable.trainable = request.trainable  # Another call may have frozen the layer.
    object.__setattr__(variable, _IS_AGAIN, True)
    return variable


def is_initialized(variable: object) -> bool:
    """Returns True in the `__init__` that follows `as_created`."""
    return vars(variable).pop(_IS_AGAIN, False)
