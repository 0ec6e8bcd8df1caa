"""Remote variables: their places on the servers, and a step's messages about them."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import numpy as np

__all__ = [
    "Gradient",
    "OptimizerScalar",
    "RemoteVariable",
    "RowGradient",
    "Scalar",
    "Stored",
    "Unplaced",
    "name_of",
]


@dataclasses.dataclass(frozen=True)
class Stored:
    """Place of a variable on the servers.

    `name` is its name there; "name:slot" for a slot.
    """

    name: str


@dataclasses.dataclass(frozen=True)
class Scalar:
    """Place of a variable that is a scalar of each server's optimizer.

    Args:
        name: its name there.
        server: the server to ask for it.
    """

    name: str
    server: int = 0


@dataclasses.dataclass(frozen=True)
class Unplaced:
    """Place of a variable that is not on the servers yet: most scalars become an optimizer's.

    `value` is its value.
    """

    value: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Gradient:
    """Message of a step: the gradient of a variable, summed over the replicas.

    Args:
        variable: the variable.
        optimizer: name of the optimizer that applies it.
    """

    variable: Any
    optimizer: str = ""


@dataclasses.dataclass(frozen=True, eq=False)
class RowGradient:
    """Message of a step: the ids of rows of a table, or the gradients of these rows.

    Args:
        table: the variable.
        is_ids: True for the ids; the gradients come right after them.
        optimizer: name of the optimizer that applies the gradients.
    """

    table: Any
    is_ids: bool
    optimizer: str = ""


@dataclasses.dataclass(frozen=True)
class OptimizerScalar:
    """Message of a step: an optimizer scalar to use with the gradients that follow.

    `name` is its name on the servers.
    """

    name: str


class RemoteVariable(Protocol):
    """A Keras variable whose value is on the servers.

    Attributes:
        place: its place; None until it has a value.
        held: its value during a step of this process: one copy, or a component per replica.
    """

    place: Stored | Scalar | Unplaced | None
    held: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        ...

    @property
    def dtype(self) -> str:
        """Its dtype."""
        ...

    @property
    def path(self) -> str:
        """Its path in its model."""
        ...

    @property
    def has_rows(self) -> bool:
        """True if single rows of it are looked up."""
        ...

    @property
    def is_added_to(self) -> bool:
        """True if a step's writes are sent as differences from the fetched value."""
        ...

    def hold(self, value: np.ndarray) -> None:
        """Stores a value for a step."""
        ...

    def whole_held(self) -> np.ndarray:
        """Returns the value after the step; the mean of components."""
        ...


def name_of(variable: Any) -> str:
    """Returns the server-side name of a variable or of an optimizer scalar."""
    return variable.place.name
