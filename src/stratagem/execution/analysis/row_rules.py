"""Rules for single primitives: which ones keep the rows of a batch independent."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jax.extend.core import JaxprEqn, Literal, Var


_ELEMENTWISE = (
    "abs acos acosh add and asin asinh atan atan2 atanh bitcast_convert_type cbrt ceil clamp "
    "conj convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2 "
    "expm1 floor ge gt imag integer_pow is_finite le lgamma log log1p logistic lt max min mul "
    "ne neg nextafter not or polygamma pow real reduce_precision rem round rsqrt select_n "
    "shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square "
    "stop_gradient sub tan tanh xor "
)
ELEMENTWISE = frozenset(_ELEMENTWISE.split())

# Linear in their single operand. Products with constants are handled separately.
_LINEAR = (
    "broadcast_in_dim convert_element_type copy copy_p neg real reduce_sum reshape squeeze "
    "stop_gradient transpose "
)
LINEAR = frozenset(_LINEAR.split())

# Primitives that call a function, and the parameter that holds it.
SUB_JAXPRS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
    "checkpoint": "jaxpr",
    "remat": "jaxpr",
    "remat2": "jaxpr",
}

_AXES = {"axes", "axis", "dimension", "concatenate_dimension"}
_WITHIN_AXES = {
    "argmax",
    "argmin",
    "concatenate",
    "cumlogsumexp",
    "cummax",
    "cummin",
    "cumprod",
    "cumsum",
    "reduce_and",
    "reduce_max",
    "reduce_min",
    "reduce_or",
    "reduce_prod",
    "reduce_sum",
    "reduce_xor",
    "rev",
    "sort",
    "split",
    "squeeze",
}


def shape_of(atom: Var | Literal) -> tuple[int, ...]:
    """Returns the shape of a value in a jaxpr of arrays."""
    aval: Any = atom.aval
    return aval.shape


def keeps_rows(eqn: JaxprEqn, in_axes: list[int | None], out_axes: list[int | None]) -> bool | None:
    """Returns True if each row of the results depends on the same row only; None if unknown.

    Axes are the row axis of each input and result, or None; at least one input has rows.
    """
    name = eqn.primitive.name
    if name in _WITHIN_AXES:
        return not {axis for axis in in_axes if axis is not None} & _axes_of(eqn)
    rule = _RULES.get(name)
    if rule is None or any(axis is None for axis in out_axes):
        return None
    return rule(eqn, in_axes, out_axes)


def contracts_rows(eqn: JaxprEqn, in_axes: list[int | None]) -> bool:
    """True if a product without rows in its result sums over the rows of both factors."""
    (left, right), _ = eqn.params["dimension_numbers"]
    return (in_axes[0], in_axes[1]) in set(zip(left, right, strict=True))


def _axes_of(eqn: JaxprEqn) -> set[int]:
    found: set[int] = set()
    for key in _AXES & set(eqn.params):
        value = eqn.params[key]
        found |= {value} if isinstance(value, int) else set(value)
    if "dimensions" in eqn.params:
        found |= set(eqn.params["dimensions"])
    return found


def _reshape(eqn: JaxprEqn, in_axes: list[int | None], out_axes: list[int | None]) -> bool | None:
    """True if each row's entries stay contiguous and in order."""
    before, after = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    is_ordered = math.prod(before[: in_axes[0]]) == math.prod(after[: out_axes[0]])
    return (is_ordered and eqn.params.get("dimensions") is None) or None


def _broadcast(eqn: JaxprEqn, in_axes: list[int | None], out_axes: list[int | None]) -> bool | None:
    return eqn.params["broadcast_dimensions"][in_axes[0]] == out_axes[0] or None


def _slice(eqn: JaxprEqn, in_axes: list[int | None], _: object) -> bool:
    axis, params = in_axes[0], eqn.params
    assert axis is not None
    stride = params["strides"][axis] if params["strides"] else 1
    taken = params["start_indices"][axis], params["limit_indices"][axis], stride
    return taken == (0, shape_of(eqn.invars[0])[axis], 1)


def _dynamic_slice(eqn: JaxprEqn, in_axes: list[int | None], _: object) -> bool | None:
    axis = in_axes[0]
    if axis is None or any(one is not None for one in in_axes[1:]):
        return None
    return eqn.params["slice_sizes"][axis] == shape_of(eqn.invars[0])[axis] or None


def _pad(eqn: JaxprEqn, in_axes: list[int | None], _: object) -> bool:
    return eqn.params["padding_config"][in_axes[0]] == (0, 0, 0)


def _top_k(eqn: JaxprEqn, in_axes: list[int | None], _: object) -> bool:
    return in_axes[0] != len(shape_of(eqn.invars[0])) - 1


def _product(eqn: JaxprEqn, in_axes: list[int | None], _: object) -> bool:
    """Two factors with rows on unmatched axes produce pairs of rows."""
    (left, right), (left_batch, right_batch) = eqn.params["dimension_numbers"]
    if in_axes[0] is not None and in_axes[1] is not None:
        return tuple(in_axes) in set(zip(left_batch, right_batch, strict=True))
    return not (in_axes[0] in left or in_axes[1] in right)


def _convolution(eqn: JaxprEqn, in_axes: list[int | None], _: object) -> bool | None:
    numbers = eqn.params["dimension_numbers"]
    is_of_batch = in_axes[0] == numbers.lhs_spec[0] and in_axes[1] is None
    return (is_of_batch and eqn.params["batch_group_count"] == 1) or None


def _lookup(eqn: JaxprEqn, in_axes: list[int | None], _: object) -> bool | None:
    numbers = eqn.params["dimension_numbers"]
    table, indices = in_axes
    if table is None:
        return True
    pairs = zip(
        getattr(numbers, "operand_batching_dims", ()),
        getattr(numbers, "start_indices_batching_dims", ()),
        strict=True,
    )
    return (table, indices) in set(pairs) or None


_RULES: dict[str, Callable[[Any, Any, Any], bool | None]] = {
    "broadcast_in_dim": _broadcast,
    "conv_general_dilated": _convolution,
    "dot_general": _product,
    "dynamic_slice": _dynamic_slice,
    "gather": _lookup,
    "pad": _pad,
    "reshape": _reshape,
    "slice": _slice,
    "top_k": _top_k,
    "transpose": lambda *_: True,
}
