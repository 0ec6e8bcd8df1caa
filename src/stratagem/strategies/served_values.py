"""Where a served variable is, and what a step sends to the servers."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import numpy as np

__all__ = [
    "Gradient",
    "OptimizerScalar",
    "RowGradient",
    "Scalar",
    "ServedVariable",
    "Stored",
    "Unplaced",
    "is_served",
    "name_of",
]


@dataclasses.dataclass(frozen=True)
class Stored:
    """A variable is on the servers.

    Args:
        name: its name there; "name:slot" for what an optimizer keeps for a variable.
    """

    name: str


@dataclasses.dataclass(frozen=True)
class Scalar:
    """A variable is one of the numbers that each server's optimizer keeps once.

    Args:
        name: its name there.
        server: the one that is asked for it.
    """

    name: str
    server: int = 0


@dataclasses.dataclass(frozen=True)
class Unplaced:
    """A variable is not on the servers yet: most scalars turn out to be an optimizer's.

    Args:
        value: its value.
    """

    value: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Gradient:
    """What a step hands out: the gradient of a variable, summed over the replicas.

    Args:
        variable: the variable.
        optimizer: the name of the one that applies it.
    """

    variable: Any
    optimizer: str = ""


@dataclasses.dataclass(frozen=True, eq=False)
class RowGradient:
    """What a step hands out: the ids of rows of a table, or the gradients of these rows.

    Args:
        table: the variable.
        is_ids: which of the two; the gradients come right after the ids.
        optimizer: the name of the one that applies them.
    """

    table: Any
    is_ids: bool
    optimizer: str = ""


@dataclasses.dataclass(frozen=True)
class OptimizerScalar:
    """What a step hands out: what an optimizer keeps once, as it is for the gradients that follow.

    Args:
        name: by which servers know it.
    """

    name: str


class ServedVariable(Protocol):
    """A Keras variable whose value is on the servers.

    Attributes:
        place: where; None until it has a value.
        held: its value while a step of this process runs: one copy, or a component a replica.
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
        """Whether single rows of it are asked for."""
        ...

    @property
    def is_added_to(self) -> bool:
        """Whether what a step writes counts as a difference to what it has read."""
        ...

    def hold(self, value: np.ndarray) -> None:
        """Keeps a value for a step."""
        ...

    def whole_held(self) -> np.ndarray:
        """The value after the step; of components their mean."""
        ...


def is_served(variable: Any) -> bool:
    """Tells whether a variable is a served one."""
    return hasattr(variable, "whole_held")


def name_of(variable: Any) -> str:
    """Returns the name by which the servers know a variable, or one of their scalars."""
    return variable.place.name
