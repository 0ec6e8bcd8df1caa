"""`StepProgram`: a jitted function of a step and the shapes of its arguments, for planning."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

__all__ = ["StepProgram", "shape_on"]


@dataclasses.dataclass(frozen=True)
class StepProgram:
    """One jitted function of a step.

    Args:
        name: its purpose.
        function: the jitted function.
        shapes: its arguments as `jax.ShapeDtypeStruct`s with shardings.
        lasting: arguments that stay in device memory between steps: variables, batch, constants.
        num_donated: number of leading arguments that are donated.
        is_of_replicas: True if it runs on the replicas' devices, not on the store's.
        brought: arguments that it copies from pinned host memory.
        put_back: results that it copies to pinned host memory.
    """

    name: str
    function: Any
    shapes: tuple[Any, ...]
    lasting: Sequence[jax.ShapeDtypeStruct]
    num_donated: int = 0
    is_of_replicas: bool = True
    brought: Sequence[jax.ShapeDtypeStruct] = ()
    put_back: Sequence[jax.ShapeDtypeStruct] = ()


def shape_on(value: Any, sharding: Any, before: tuple[int, ...] = ()) -> jax.ShapeDtypeStruct:
    """Returns shape and dtype of an array with a sharding, after the leading axes in `before`."""
    return jax.ShapeDtypeStruct((*before, *value.shape), value.dtype, sharding=sharding)
