"""Registry of a strategy's variables; lookup of the strategy that owns a variable.

Keras variables compare elementwise and cannot be dict keys, so entries are keyed by identity and
removed when the variable is garbage collected.
"""

from __future__ import annotations

import dataclasses
import weakref
from typing import TYPE_CHECKING, Any, Protocol

from stratagem.options import VariableAggregation
from stratagem.variables.exhausted_memory import ExplainsExhaustedMemory
from stratagem.variables.kind import VariableKind

if TYPE_CHECKING:
    import keras


class StoredVariable(Protocol):
    """A Keras variable that was created in a strategy's scope.

    `storage` is the whole array as its kind stores it; None until initialized. `initial_digest` is
    the digest of the initial value, for comparison between processes.
    """

    storage: Any
    initial_digest: int

    @property
    def for_step(self) -> Any:
        """Input of a compiled step for this variable."""
        ...

    @property
    def has_value(self) -> bool:
        """True once initialized."""
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
        """Sets the initial value of a variable that was created in a step."""
        ...


@dataclasses.dataclass(frozen=True)
class Home:
    """Strategy, kind and aggregation of a variable."""

    strategy: Any
    kind: VariableKind
    aggregation: VariableAggregation


_homes: dict[int, tuple[weakref.ref[Any], Home]] = {}


def home_of(variable: object) -> Home | None:
    """Returns an object's home; None if it was created outside every scope."""
    entry = _homes.get(id(variable))
    return entry[1] if entry is not None and entry[0]() is variable else None


class VariableRegistry:
    """Variables of one strategy in creation order."""

    def __init__(self) -> None:
        self._references: dict[int, weakref.ref[Any]] = {}
        self._unsettled: dict[int, weakref.ref[Any]] = {}

    def add(self, variable: keras.Variable, home: Home) -> None:
        """Registers a new variable."""
        reference = self.add_slot(variable, home)
        self._references[id(variable)] = self._unsettled[id(variable)] = reference

    def add_slot(self, variable: object, home: Home) -> weakref.ref[Any]:
        """Registers the home of a value that steps use like a variable, without listing it."""
        key = id(variable)
        registry = weakref.ref(self)  # Weak, because self holds the callback.

        def forget(_: object) -> None:
            _homes.pop(key, None)
            remaining = registry()
            if remaining is not None:
                remaining._references.pop(key, None)
                remaining._unsettled.pop(key, None)

        reference = weakref.ref(variable, forget)
        _homes[key] = (reference, home)
        return reference

    def release(self, variable: keras.Variable) -> None:
        """Removes a variable, which then belongs to no strategy."""
        self._references.pop(id(variable), None)
        self._unsettled.pop(id(variable), None)
        _homes.pop(id(variable), None)

    def live(self) -> list[StoredVariable]:
        """Returns the existing, initialized variables, oldest first."""
        variables = [reference() for reference in list(self._references.values())]
        return [variable for variable in variables if variable is not None and variable.has_value]

    def explains_exhausted_memory(self) -> ExplainsExhaustedMemory:
        """Returns a context for work of the strategy that may need more memory than there is."""
        return ExplainsExhaustedMemory(self.live)

    def take_unsettled(self) -> list[StoredVariable]:
        """Returns the variables initialized since the last call, oldest first."""
        variables = [reference() for reference in list(self._unsettled.values())]
        settled = [
            variable for variable in variables if variable is not None and variable.has_value
        ]
        for variable in settled:
            self._unsettled.pop(id(variable), None)
        return settled

    def uninitialized(self) -> list[StoredVariable]:
        """Returns the variables created in a step that have no value yet."""
        variables = [reference() for reference in list(self._references.values())]
        return [
            variable for variable in variables if variable is not None and not variable.has_value
        ]
