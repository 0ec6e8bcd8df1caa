"""Optimizer slots, each stored where its variable is.

A slot needs its variable before it gets a value.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import keras

from stratagem.keras.patches import patches
from stratagem.keras.variables.annotations import annotated_variables, making_slot_of
from stratagem.keras.variables.variable_creation import in_scope_of_slot
from stratagem.variables.registry import home_of
from stratagem.variables.store import is_remote


def _of_each_replica(variable: Any) -> contextlib.AbstractContextManager[None]:
    """Annotates slots of replicas that train apart: each has its own, and files their mean."""
    home = home_of(variable)
    is_float = jnp.issubdtype(jnp.dtype(variable.dtype), jnp.floating)
    if home is None or home.strategy.islands is None or not is_float:
        return contextlib.nullcontext()
    return annotated_variables(synchronization="on_read", aggregation="mean")


@patches(
    keras.optimizers.Optimizer,
    "add_variable_from_reference",
    why="a slot is stored where its variable is, and belongs to the strategy of its variable",
)
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
            with _of_each_replica(reference_variable):
                made = create()
        made.slot_of = reference_variable  # It may join a strategy later.
        return made

    return in_scope_of_slot(add)
