"""`StepProgram`: a jitted function of a step and the shapes of its arguments, for planning."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax

if TYPE_CHECKING:
    from stratagem.execution.tracing.arguments import Shaped


@dataclasses.dataclass(frozen=True)
class StepProgram:
    """One jitted function of a step. Shapes are `jax.ShapeDtypeStruct`s with shardings."""

    name: str
    function: Any
    shapes: tuple[Any, ...]  # of its arguments
    lasting: Sequence[jax.ShapeDtypeStruct]  # arguments in device memory between steps
    num_donated: int = 0  # leading arguments that are donated
    is_of_replicas: bool = True  # True on the replicas' devices, False on the store's
    brought: Sequence[jax.ShapeDtypeStruct] = ()  # arguments copied from pinned host memory
    put_back: Sequence[jax.ShapeDtypeStruct] = ()  # results copied to pinned host memory


def shape_on(
    value: Shaped, sharding: jax.sharding.Sharding, before: tuple[int, ...] = ()
) -> jax.ShapeDtypeStruct:
    """Returns shape and dtype of an array with a sharding, after the leading axes in `before`."""
    return jax.ShapeDtypeStruct((*before, *value.shape), value.dtype, sharding=sharding)
