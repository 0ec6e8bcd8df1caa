"""How a server applies gradients: by a rule that a client has sent it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

__all__ = ["Slot", "State", "UpdateRule"]


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
    """What a rule changes.

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
            grads: of the same names and shapes as the values.
        """
        ...

    def describe(self) -> dict[str, Any]:
        """Returns what tells one rule from another, of what JSON can hold."""
        ...
