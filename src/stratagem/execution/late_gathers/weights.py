"""Weights of a step that are not gathered yet, and values that follow from them alone."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from stratagem.execution.analysis.retracing import CALLS
from stratagem.execution.late_gathers.exchanges import Sharded

if TYPE_CHECKING:
    from jax.extend.core import JaxprEqn


# Operations so cheap that repeating them for each use of a weight costs less than the memory of
# their result: casts, changes of shape, and what quantized weights are computed with.
_CHEAP = frozenset(
    [
        *("abs", "add", "and", "broadcast_in_dim", "clamp", "concatenate", "convert_element_type"),
        *("copy", "copy_p", "div", "eq", "exp", "expand_dims", "ge", "gt", "integer_pow", "le"),
        *("lt", "max", "min", "mul", "ne", "neg", "not", "or", "pad", "reshape", "rev", "round"),
        *("rsqrt", "select_n", "shift_left", "shift_right_arithmetic", "shift_right_logical"),
        *("sign", "slice", "split", "sqrt", "square", "squeeze", "sub", "transpose"),
    ]
)
# A product of two weights is repeated if it is of a low rank, as in LoRA.
_MAX_RANK = 256


@dataclasses.dataclass(eq=False)
class WeightShard:
    """A weight that is not gathered yet: this replica's shard."""

    value: Any
    sharded: Sharded
    place: Any  # among the inputs of the step or of a loop; for other stacks, their variable


@dataclasses.dataclass(eq=False)
class Deferred:
    """A result of cheap operations on weights alone, which is computed where it is read."""

    eqn: JaxprEqn
    inputs: Sequence[Any]
    place: int  # among the results of the operation


Late = WeightShard | Deferred


def num_bytes(value: Any) -> int:
    """Returns the size of an array, or of its type."""
    return value.size * value.dtype.itemsize


def is_literal(atom: Any) -> bool:
    """Returns True for a literal of a jaxpr."""
    return isinstance(atom, Literal)


def shape_of(atom: Any) -> tuple[int, ...]:
    """Returns the shape of a value of a jaxpr."""
    return tuple(atom.aval.shape)


def is_cheap(eqn: JaxprEqn) -> bool:
    """Returns True if an operation on weights is repeated for each use of its result."""
    name = eqn.primitive.name
    if name == "broadcast_in_dim":
        return math.prod(eqn.params["shape"]) <= 4 * math.prod(shape_of(eqn.invars[0]))
    if name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        shape = shape_of(eqn.invars[0])
        return math.prod(shape[axis] for axis in contracted) <= _MAX_RANK
    if (inner := inner_jaxpr(eqn)) is not None:
        return all(map(is_cheap, inner.eqns))
    return name in _CHEAP


def narrowing_cast(value: Deferred) -> Any:
    """Returns the dtype of a cast of a shard to fewer bytes; otherwise None."""
    (source, *_), eqn = value.inputs, value.eqn
    if eqn.primitive.name != "convert_element_type" or not isinstance(source, WeightShard):
        return None
    dtype = eqn.params["new_dtype"]
    return dtype if jnp.dtype(dtype).itemsize < source.value.dtype.itemsize else None


def inner_jaxpr(eqn: JaxprEqn) -> Jaxpr | None:
    """Returns the jaxpr that an operation calls once; None for other operations."""
    inner = eqn.params.get(CALLS.get(eqn.primitive.name, ""))
    if isinstance(inner, ClosedJaxpr):
        return None if inner.consts else inner.jaxpr
    return inner


def is_recomputation(eqn: JaxprEqn) -> bool:
    """True for a rematerialized part of the backward pass."""
    params = eqn.params
    return bool(params.get("differentiated")) and bool(params.get("prevent_cse"))
