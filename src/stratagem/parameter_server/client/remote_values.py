"""Places of remote variables on servers, and a step's outgoing gradients."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import numpy as np


@dataclasses.dataclass(frozen=True)
class Stored:
    """Place of a variable or slot on the servers, by name; "name:slot" for a slot."""

    name: str


@dataclasses.dataclass(frozen=True)
class Scalar:
    """Place of a variable that is an optimizer scalar on each server; reads ask `server`."""

    name: str
    server: int = 0


@dataclasses.dataclass(frozen=True)
class Unplaced:
    """Place of a variable that is not on the servers yet. Most scalars end up in an optimizer."""

    value: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Gradient:
    """Gradient of a variable, summed over the replicas; the servers' `optimizer` applies it."""

    variable: Any
    optimizer: str = ""


@dataclasses.dataclass(frozen=True, eq=False)
class RowGradient:
    """Row ids of a table, or gradients of these rows, which directly follow the ids."""

    table: Any
    is_ids: bool
    optimizer: str = ""


@dataclasses.dataclass(frozen=True, eq=False)
class Assigned:
    """Value that a step sets a variable to before gradients for `optimizer`; or a difference."""

    variable: Any
    optimizer: str
    is_added: bool


@dataclasses.dataclass(frozen=True)
class IsFinite:
    """False if the gradients for `optimizer` that follow must not be used."""

    optimizer: str


@dataclasses.dataclass(frozen=True)
class OptimizerScalar:
    """Optimizer scalar, by server-side name, to use with the gradients that follow."""

    name: str


class RemoteVariable(Protocol):
    """Keras variable whose value is on the servers.

    `place` is None until it has a value. `held` is its value during a step of this process: one
    copy, or a component per replica.
    """

    place: Stored | Scalar | Unplaced | None
    held: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the variable."""
        ...

    @property
    def dtype(self) -> str:
        """Dtype of the variable."""
        ...

    @property
    def path(self) -> str:
        """Path of the variable in its model."""
        ...

    @property
    def has_rows(self) -> bool:
        """True if steps look up single rows."""
        ...

    @property
    def is_added_to(self) -> bool:
        """True if a step's writes are sent as differences from the fetched value."""
        ...

    def hold(self, value: np.ndarray) -> None:
        """Stores a value for a step."""
        ...

    def whole_held(self) -> np.ndarray:
        """Returns the value after the step: the mean over components."""
        ...


class _Named(Protocol):
    """A remote variable that is on the servers."""

    @property
    def place(self) -> Any:
        """Its place, a `Stored` or `Scalar`."""
        ...


def name_of(variable: _Named) -> str:
    """Returns the server-side name of a variable or optimizer scalar."""
    return variable.place.name
