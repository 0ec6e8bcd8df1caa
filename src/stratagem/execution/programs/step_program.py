"""Description of a step's programs and their arguments, for planning."""

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
        name: what it does.
        function: the function, jitted.
        shapes: its arguments, arrays as `jax.ShapeDtypeStruct`s with their shardings.
        lasting: those of the arrays that are there before and after it, whether it runs or not:
            variables as they are kept on devices, the batch, constants.
        num_donated: how many of the arguments, from the first on, it takes over.
        is_of_replicas: whether their devices run it, and not the one that keeps variables.
        brought: those of the arrays that it brings over from pinned memory of the host.
        put_back: those of its results that it puts there.
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
