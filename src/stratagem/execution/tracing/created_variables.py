"""Initialization of variables that a replica function creates on its first call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras

if TYPE_CHECKING:
    from stratagem.contexts import StrategyParts


def initialize_created() -> None:
    """Initializes variables that this thread created in Keras scopes."""
    with keras.StatelessScope():  # Keras does so on leaving the outermost scope
        pass


def initialize_created_variables(strategy: StrategyParts) -> None:
    """Initializes variables created by a replica function, outside its trace."""
    initialize_created()
    for variable in strategy.variables.uninitialized():  # created in a replica's thread
        variable.initialize()


def is_uninitialized(variable: Any) -> bool:
    """True if a Keras variable was created in a trace and has no value yet."""
    if hasattr(variable, "has_value"):  # reading the value may fetch it from a server
        return not variable.has_value
    return getattr(variable, "_value", None) is None


def stand_in(variable: Any) -> Any:
    """Returns an initial value for a variable created in this trace; None for others.

    Keras reads variables through the scope for regularization losses, before they have values.
    """
    if not is_uninitialized(variable):
        return None
    return variable._initializer(variable._shape, dtype=variable._dtype)
