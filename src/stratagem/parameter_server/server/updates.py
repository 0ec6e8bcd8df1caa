"""Update rules: optimizers that clients send to servers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from stratagem.messages import explain

__all__ = [
    "ASYNCHRONOUS",
    "Pushed",
    "Slot",
    "State",
    "UpdateMode",
    "UpdateRule",
    "is_kept_by",
    "kept_name",
    "own_name",
]


@dataclasses.dataclass(frozen=True)
class Slot:
    """An array that a rule keeps for a variable.

    Args:
        name: unique among those of the variable.
        dtype: its dtype; its shape is the variable's.
        initial: the value that each element begins with.
    """

    name: str
    dtype: str
    initial: float


@dataclasses.dataclass(frozen=True)
class State:
    """State that a rule updates.

    Args:
        scalars: what it keeps once, such as the number of updates, by name.
        values: of variables, by name.
        slots: of each variable, by its name and that of the slot.
    """

    scalars: Mapping[str, np.ndarray]
    values: Mapping[str, np.ndarray]
    slots: Mapping[str, Mapping[str, np.ndarray]]


class UpdateRule(Protocol):
    """An optimizer, as servers see it. It treats every row alike, so that some can be updated."""

    def scalars(self) -> dict[str, np.ndarray]:
        """Returns what it keeps once, as it is in the beginning."""
        ...

    def slots(self, name: str, shape: tuple[int, ...], dtype: str) -> list[Slot]:
        """Returns what it keeps for a variable.

        Args:
            name: of the variable.
            shape: of the variable, or of its shard.
            dtype: of the variable.
        """
        ...

    def apply(self, state: State, grads: Mapping[str, np.ndarray]) -> State:
        """Returns the state after one update, without changing the arrays it is given.

        Args:
            state: the scalars, and values and slots of the variables that have gradients: all of
                them, or some rows.
            grads: of the same names and shapes as the values. Their memory is used again: what is
                returned shares none with them.
        """
        ...

    def describe(self) -> dict[str, Any]:
        """Returns what tells one rule from another, of what JSON can hold."""
        ...


@dataclasses.dataclass(frozen=True)
class UpdateMode:
    """When a server applies gradients.

    Args:
        num_needed: the gradients of so many workers are added up and applied at once; 0 applies
            each worker's when they come.
        max_staleness: gradients are discarded if their values are older than so many updates;
            None for never. Only without `num_needed`, with which every older one is discarded.

    Raises:
        ValueError: a negative number, or both.
    """

    num_needed: int = 0
    max_staleness: int | None = None

    def __post_init__(self) -> None:
        if self.num_needed < 0 or (self.max_staleness or 0) < 0:
            raise ValueError(
                explain(
                    f"{self} has a negative number.",
                    expected="how many workers and updates, from 0 on.",
                    fix="leave out num_needed for asynchronous updates, and max_staleness for "
                    "gradients of any age.",
                )
            )
        if self.num_needed and self.max_staleness is not None:
            raise ValueError(
                explain(
                    f"{self} bounds the staleness of synchronous updates.",
                    expected="max_staleness without num_needed.",
                    fix="leave out max_staleness: synchronous updates use no stale gradients.",
                )
            )


ASYNCHRONOUS = UpdateMode()


@dataclasses.dataclass(frozen=True)
class Pushed:
    """Result of a push of gradients.

    Args:
        is_used: whether a server has applied them. If not, they were too old: a worker computes
            them again from new values, or goes on.
        num_discarded: how many servers have not applied their part.
        version: how many updates each server that was asked has made at least.
        values: whole variables that were asked for, by name, as they were right after the update;
            they must not be changed.
    """

    is_used: bool
    num_discarded: int
    version: int
    values: Mapping[str, np.ndarray]


def kept_name(optimizer: str, name: str) -> str:
    """Returns the name of what an optimizer keeps: a slot of a variable, or a scalar.

    Args:
        optimizer: its name, without a dot; "" for the only one.
        name: unique among what this optimizer keeps, without a dot.
    """
    return f"{optimizer}.{name}" if optimizer else name


def own_name(optimizer: str, name: str) -> str:
    """Returns the name by which an optimizer itself knows what it keeps.

    Args:
        optimizer: its name.
        name: what `kept_name` returned.
    """
    return name[len(optimizer) + 1 :] if optimizer else name


def is_kept_by(optimizer: str, name: str) -> bool:
    """Returns True if a name is that of an optimizer's scalar.

    Args:
        optimizer: its name.
        name: what `kept_name` returned.
    """
    return name.rpartition(".")[0] == optimizer
