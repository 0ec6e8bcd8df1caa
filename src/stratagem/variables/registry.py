"""Which strategy a variable belongs to, and every variable that a strategy has.

Keras variables compare element by element and so cannot be keys; they are found by identity, and
forgotten when they are collected.
"""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any, Protocol

from stratagem.options import VariableAggregation
from stratagem.variables.kind import VariableKind

__all__ = ["Home", "StoredVariable", "VariableRegistry", "home_of"]


class StoredVariable(Protocol):
    """A Keras variable that was created in a strategy's scope.

    Attributes:
        storage: the whole array, as its kind stores it; None until it is initialised.
        initial_digest: of its initial value, where several processes have to have the same.
    """

    storage: Any
    initial_digest: int

    @property
    def for_step(self) -> Any:
        """What a compiled step of its strategy gets of it."""
        ...

    @property
    def has_value(self) -> bool:
        """Whether it is initialised."""
        ...

    @property
    def path(self) -> str:
        """The variable's path in its model."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one copy or component."""
        ...

    @property
    def dtype(self) -> str:
        """The variable's dtype."""
        ...

    def initialize(self) -> None:
        """Gives a variable that was created in a step its initial value."""
        ...


@dataclasses.dataclass(frozen=True)
class Home:
    """Where a variable belongs.

    Args:
        strategy: the strategy in whose scope it was created.
        kind: how it is stored.
        aggregation: how contributions to it are combined.
    """

    strategy: Any
    kind: VariableKind
    aggregation: VariableAggregation


_homes: dict[int, tuple[weakref.ref[Any], Home]] = {}


def home_of(variable: Any) -> Home | None:
    """Returns where a variable belongs.

    Args:
        variable: any object.

    Returns:
        Its home; None for what was created outside every scope.
    """
    entry = _homes.get(id(variable))
    return entry[1] if entry is not None and entry[0]() is variable else None


class VariableRegistry:
    """The variables of one strategy, in the order of their creation."""

    def __init__(self) -> None:
        self._references: dict[int, weakref.ref[Any]] = {}
        self._unsettled: dict[int, weakref.ref[Any]] = {}

    def add(self, variable: Any, home: Home) -> None:
        """Notes a new variable.

        Args:
            variable: the variable.
            home: where it belongs.
        """
        reference = self.add_slot(variable, home)
        self._references[id(variable)] = self._unsettled[id(variable)] = reference

    def add_slot(self, variable: Any, home: Home) -> weakref.ref[Any]:
        """Notes what steps read and write like a variable, and is none of the strategy's."""
        key = id(variable)
        registry = weakref.ref(self)  # a plain reference would be a cycle: self holds the callback

        def forget(_: Any) -> None:
            _homes.pop(key, None)
            remaining = registry()
            if remaining is not None:
                remaining._references.pop(key, None)
                remaining._unsettled.pop(key, None)

        reference = weakref.ref(variable, forget)
        _homes[key] = (reference, home)
        return reference

    def release(self, variable: Any) -> None:
        """Forgets a variable, which belongs to no strategy then.

        Args:
            variable: one that was added.
        """
        self._references.pop(id(variable), None)
        self._unsettled.pop(id(variable), None)
        _homes.pop(id(variable), None)

    def live(self) -> list[StoredVariable]:
        """Returns the variables that exist and have a value, oldest first."""
        variables = [reference() for reference in list(self._references.values())]
        return [variable for variable in variables if variable is not None and variable.has_value]

    def take_unsettled(self) -> list[StoredVariable]:
        """Returns the variables that got a value since this was last asked, oldest first."""
        variables = [reference() for reference in list(self._unsettled.values())]
        settled = [
            variable for variable in variables if variable is not None and variable.has_value
        ]
        for variable in settled:
            self._unsettled.pop(id(variable), None)
        return settled

    def uninitialized(self) -> list[StoredVariable]:
        """Returns the variables that were created in a step and still have no value."""
        variables = [reference() for reference in list(self._references.values())]
        return [
            variable for variable in variables if variable is not None and not variable.has_value
        ]
