"""Optimizer slots, each stored where its variable is.

A slot needs its variable before it gets a value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from stratagem.keras.variables.annotations import making_slot_of
from stratagem.variables import is_remote

if TYPE_CHECKING:
    import keras


__all__ = ["slot_of_variable"]


def slot_of_variable(original: Callable[..., Any]) -> Any:
    """Returns `Optimizer.add_variable_from_reference` whose slots reference their variables."""

    def add(
        self: keras.optimizers.Optimizer,
        reference_variable: keras.Variable,
        name: object = None,
        *args: object,
        **kwargs: object,
    ) -> Any:
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
