"""Optimizer slots, each stored where its variable is.

A slot needs its variable before it gets a value.
"""

from __future__ import annotations

from typing import Any

from stratagem.keras.variables.annotations import making_slot_of
from stratagem.variables import is_remote

__all__ = ["slot_of_variable"]


def slot_of_variable(original: Any) -> Any:
    """Returns `Optimizer.add_variable_from_reference` whose slots reference their variables."""

    def add(self: Any, reference_variable: Any, name: Any = None, *args: Any, **kwargs: Any) -> Any:
        def create() -> Any:
            return original(self, reference_variable, name, *args, **kwargs)

        with making_slot_of(reference_variable):
            if is_remote(reference_variable):
                remote = reference_variable.distribute_strategy.placement.remote
                return remote.keras.create_slot(self, reference_variable, name, create)
            made = create()
        made.slot_of = reference_variable  # It may join a strategy later.
        return made

    return add
