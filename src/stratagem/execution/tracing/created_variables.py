"""Variables that a replica function creates on its first call."""

from __future__ import annotations

from typing import Any

import keras

__all__ = ["initialize_created", "initialize_created_variables", "is_uninitialized", "stand_in"]


def initialize_created() -> None:
    """Gives variables that this thread has created in scopes of Keras their initial values."""
    with keras.StatelessScope():  # leaving the outermost one is when Keras does so
        pass


def initialize_created_variables(strategy: Any) -> None:
    """Gives variables that a replica function created their initial values, outside its trace.

    Args:
        strategy: the strategy whose replicas created them.
    """
    initialize_created()
    for variable in strategy.variables.uninitialized():  # created in the thread of a replica
        variable.initialize()


def is_uninitialized(variable: Any) -> bool:
    """Tells whether a Keras variable was created in a trace and has no value yet.

    Args:
        variable: the variable.

    Returns:
        True if so.
    """
    if hasattr(variable, "has_value"):  # the value itself may be far away
        return not variable.has_value
    return getattr(variable, "_value", None) is None


def stand_in(variable: Any) -> Any:
    """Returns what stands in a trace for the value of a variable that was created in it.

    Keras's losses of regularizers ask the scope for values, and not the variables.

    Args:
        variable: the variable.

    Returns:
        A value of its initializer; None for a variable that has its own value.
    """
    if not is_uninitialized(variable):
        return None
    return variable._initializer(variable._shape, dtype=variable._dtype)
