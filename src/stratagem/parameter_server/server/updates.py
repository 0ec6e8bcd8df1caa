"""Update rules: optimizers that clients send to servers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from stratagem.errors import explain


@dataclasses.dataclass(frozen=True)
class Slot:
    """Optimizer state of a variable, with the variable's shape.

    Args:
        name: unique among the variable's slots.
        dtype: dtype name.
        initial: initial value of each element.
    """

    name: str
    dtype: str
    initial: float


@dataclasses.dataclass(frozen=True)
class State:
    """State that a rule updates.

    Args:
        scalars: state shared by all variables, such as the step count, by name.
        values: variable values, by variable name.
        slots: slots by variable name, then by slot name.
        rows: names of the values that are some rows of a table, padded with zeros.
    """

    scalars: Mapping[str, np.ndarray]
    values: Mapping[str, np.ndarray]
    slots: Mapping[str, Mapping[str, np.ndarray]]
    rows: Sequence[str] = ()


class UpdateRule(Protocol):
    """An optimizer as servers see it. It must treat all rows alike, to support row updates."""

    def scalars(self) -> dict[str, np.ndarray]:
        """Returns the initial scalars shared by all variables."""
        ...

    def slots(self, name: str, shape: tuple[int, ...], dtype: str) -> list[Slot]:
        """Returns the slots of a variable or of its shard."""
        ...

    def apply(self, state: State, grads: Mapping[str, np.ndarray]) -> State:
        """Returns the state after one update; does not modify or alias its inputs.

        `state` holds only variables that have gradients: all rows or some. `grads` has the same
        names and shapes as the values. Its memory is reused after the call.
        """
        ...

    def describe(self) -> dict[str, Any]:
        """Returns a JSON-serializable description; different rules return different ones."""
        ...


@dataclasses.dataclass(frozen=True)
class UpdateMode:
    """Synchronous or asynchronous updates, and the staleness limit.

    Args:
        num_needed: number of workers whose gradients are summed and applied at once; 0 applies each
            worker's gradients on arrival.
        max_staleness: discard gradients computed from values more than this many updates old; None
            for no limit. For asynchronous updates only: synchronous ones discard all stale
            gradients.

    Raises:
        ValueError: a negative number, or both are set.
    """

    num_needed: int = 0
    max_staleness: int | None = None

    def __post_init__(self) -> None:
        if self.num_needed < 0 or (self.max_staleness or 0) < 0:
            raise ValueError(
                explain(
                    f"{self} has a negative number.",
                    expected="num_needed and max_staleness to be 0 or more.",
                    fix="omit num_needed for asynchronous updates, and max_staleness to accept "
                    "gradients of any age.",
                )
            )
        if self.num_needed and self.max_staleness is not None:
            raise ValueError(
                explain(
                    f"{self} limits the staleness of synchronous updates.",
                    expected="max_staleness only with num_needed=0.",
                    fix="omit max_staleness: synchronous updates discard all stale gradients.",
                )
            )


ASYNCHRONOUS = UpdateMode()


@dataclasses.dataclass(frozen=True)
class Pushed:
    """Result of a gradient push.

    Args:
        is_used: False if every server discarded its part as stale. A worker then recomputes the
            gradients from new values, or continues with its next batch.
        num_discarded: number of servers that discarded their part.
        version: smallest version among the servers in the request.
        values: requested whole variables right after the update, by name; read-only.
    """

    is_used: bool
    num_discarded: int
    version: int
    values: Mapping[str, np.ndarray]


def stored_name(optimizer: str, name: str) -> str:
    """Returns the full name of an optimizer's slot or scalar.

    Neither part may contain a dot. `optimizer` is "" if there is only one.
    """
    return f"{optimizer}.{name}" if optimizer else name


def own_name(optimizer: str, name: str) -> str:
    """Returns the optimizer's own name for a slot or scalar: the inverse of `stored_name`."""
    return name[len(optimizer) + 1 :] if optimizer else name


def is_stored_by(optimizer: str, name: str) -> bool:
    """Returns True if a `stored_name` belongs to an optimizer."""
    return name.rpartition(".")[0] == optimizer
