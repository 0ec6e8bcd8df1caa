"""Row effects: a result may depend on a batch row by row, be a sum or mean over rows, or mix rows.

The function is traced with two numbers of rows, and a pass over both traces labels each value. An
axis whose size differs holds rows; a literal that grows with them is a count. Every label except
MIXED and UNKNOWN is a proof.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.extend.core import Literal

from stratagem.execution.jaxprs import ELEMENTWISE, called_jaxpr, labeled, shape_of

if TYPE_CHECKING:
    from jax.extend.core import JaxprEqn, Var

    from stratagem.execution.tracing.arguments import Shaped

# Linear in their single operand. Products with constants are handled separately.
LINEAR = frozenset(
    [
        *("broadcast_in_dim", "convert_element_type", "copy", "copy_p", "neg", "real"),
        *("reduce_sum", "reshape", "squeeze", "stop_gradient", "transpose"),
    ]
)

# Two primes, unlikely to be another size in a model.
_NUM_ROWS = (1009, 1013)


class RowEffect(enum.Enum):
    """Dependence of a value on the rows of a batch."""

    FREE = "the same for any rows"
    ROWS = "one entry, or block of entries, for each row, which depends on that row alone"
    COUNT = "a constant multiple of the number of rows"
    SUM = "a sum over rows"
    MEAN = "a mean over rows"
    INPUT = "an input without rows, unchanged"
    INPUT_PLUS_SUM = "an input without rows, and a sum over rows added to it"
    MIXED = "rows depend on one another"
    UNKNOWN = "an operation that is not followed"


_SUMS = {RowEffect.SUM, RowEffect.COUNT}


def row_effects(
    function: Callable[[list[Any], list[Any]], Sequence[Any]],
    state: Sequence[Any],
    rows: Sequence[Any],
    num_rows: int,
) -> list[RowEffect] | None:
    """Returns the effect of each result of `function(state, rows)`; None if it cannot be traced.

    A result with effect INPUT or INPUT_PLUS_SUM has the same index as its input in `state`.
    """
    traces = []
    try:
        for size in _NUM_ROWS:
            many = [_with_rows(leaf, size, num_rows) for leaf in rows]
            traces.append(jax.make_jaxpr(function)(list(map(_struct, state)), many))
    except Exception:  # noqa: BLE001 - user code may accept one number of rows only
        return None
    labels = [(RowEffect.INPUT, index) for index in range(len(state))]
    results = _labels(traces, [*labels, *[RowEffect.ROWS] * len(rows)])
    effects = []
    for place, label in enumerate(results):
        effect, source = label if isinstance(label, tuple) else (label, place)
        effects.append(effect if source == place else RowEffect.UNKNOWN)
    return effects


def adds_to_inputs(
    function: Callable[[list[Any]], Sequence[Any]], inputs: Sequence[Shaped]
) -> bool:
    """Returns True if each result of `function(inputs)` is its input plus what depends on none."""
    jaxpr = jax.make_jaxpr(function)(list(map(_struct, inputs)))
    return _inputs_added_to(jaxpr, range(len(inputs))) == [*range(len(inputs))]


# Of a value: it depends on inputs in another way than by addition.
_NOT_ADDED = -1
_PASSED_ON = {"convert_element_type", "copy", "copy_p", "reshape", "squeeze"}


def _inputs_added_to(jaxpr: Any, inputs: Sequence[int | None]) -> list[int | None]:
    """Returns the input to which each result adds; None for results that depend on none."""

    def of_operation(eqns: Sequence[JaxprEqn], labels: list[int | None]) -> Sequence[int | None]:
        if all(label is None for label in labels):
            return [None] * len(eqns[0].outvars)
        return _added_by(eqns[0], labels)

    return labeled(
        [jaxpr],
        inputs,
        of_constants=lambda _: None,
        of_operation=of_operation,
        if_unlike=_NOT_ADDED,
    )


def _added_by(eqn: JaxprEqn, labels: list[int | None]) -> Sequence[int | None]:
    """Returns the label of each result of an operation of which an operand depends on inputs."""
    name, first, rest = eqn.primitive.name, labels[0], labels[1:]
    if (called := called_jaxpr(eqn)) is not None:
        return _inputs_added_to(called, labels)
    if name == "cond" and first is None:
        branches = [_inputs_added_to(one, rest) for one in eqn.params["branches"]]
        return [one[0] if len({*one}) == 1 else _NOT_ADDED for one in zip(*branches, strict=True)]
    given = [label for label in labels if label is not None]
    is_added = (
        (name in ("add", "add_any") and len(given) == 1)
        or (name in ("sub", "scatter-add", *_PASSED_ON) and given == [first])
        or (name == "select_n" and first is None and len(given) == len(rest))
    )
    same = given[0] if is_added and len({*given}) == 1 else _NOT_ADDED
    return [same] * len(eqn.outvars)


def _struct(leaf: Shaped) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def _with_rows(leaf: Shaped, size: int, num_rows: int) -> jax.ShapeDtypeStruct:
    per_row = leaf.shape[0] // num_rows if num_rows else 1
    return jax.ShapeDtypeStruct((size * per_row, *leaf.shape[1:]), leaf.dtype)


def _labels(traces: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
    """Returns the labels of the results of one function, given the labels of its inputs."""
    return labeled(
        traces,
        inputs,
        of_constants=_of_constants,
        of_operation=_of_operation,
        if_unlike=RowEffect.UNKNOWN,
    )


def _of_constants(one: Var | Literal, other: Var | Literal) -> RowEffect:
    if not (isinstance(one, Literal) and isinstance(other, Literal)):
        is_free = type(one) is type(other) and shape_of(one) == shape_of(other)
        return RowEffect.FREE if is_free else RowEffect.UNKNOWN
    values = [float(np.real(literal.val)) for literal in (one, other)]
    if values[0] == values[1] or all(np.isnan(values)):
        return RowEffect.FREE
    is_count = np.isclose(values[0] * _NUM_ROWS[1], values[1] * _NUM_ROWS[0], rtol=1e-6)
    return RowEffect.COUNT if is_count else RowEffect.UNKNOWN


def row_axes(atom: Var | Literal, twin: Var | Literal) -> list[int]:
    """Returns the axes of a value that hold rows."""
    sizes = zip(shape_of(atom), shape_of(twin), strict=True)
    return [axis for axis, (one, other) in enumerate(sizes) if one != other]


def _of_operation(eqns: Sequence[JaxprEqn], labels: list[Any]) -> list[Any]:
    eqn, twin = eqns
    if called_jaxpr(eqn) is not None:
        return _labels([*map(called_jaxpr, eqns)], labels)
    pairs = list(zip(eqn.outvars, twin.outvars, strict=True))
    axes = [row_axes(*pair) for pair in pairs]
    if RowEffect.MIXED in labels or any(len(one) > 1 for one in axes):
        return [RowEffect.MIXED] * len(pairs)
    if RowEffect.UNKNOWN in labels:
        return [RowEffect.UNKNOWN] * len(pairs)
    effect = _effect(eqn, twin, labels, [one[0] if one else None for one in axes])
    return [effect] * len(pairs)


def _effect(eqn: JaxprEqn, twin: JaxprEqn, labels: list[Any], out_axes: list[int | None]) -> Any:
    """Returns the effect of an operation whose inputs all have known labels."""
    pairs = zip(eqn.invars, twin.invars, strict=True)
    in_axes = [(row_axes(*pair) or [None])[0] for pair in pairs]
    makes_rows = any(axis is not None for axis in out_axes)
    others = {RowEffect.ROWS, RowEffect.FREE}
    if all(label is RowEffect.FREE for label in labels):
        return _of_new_rows(eqn.primitive.name) if makes_rows else RowEffect.FREE
    if RowEffect.ROWS not in labels:
        return RowEffect.MIXED if makes_rows else _of_totals(eqn.primitive.name, labels)
    if any(label not in others for label in labels):
        return RowEffect.MIXED  # combines rows with a total over rows
    return _of_rows(eqn, twin, in_axes, out_axes)


def _of_new_rows(name: str) -> RowEffect:
    """Returns the effect of an operation that creates rows: all equal, or numbered."""
    if name == "broadcast_in_dim":
        return RowEffect.ROWS
    return RowEffect.MIXED if name == "iota" else RowEffect.UNKNOWN


def _of_rows(
    eqn: JaxprEqn, twin: JaxprEqn, in_axes: list[int | None], out_axes: list[int | None]
) -> RowEffect:
    name = eqn.primitive.name
    keeps: bool | None
    if out_axes == [None] and name in ("reduce_sum", "dot_general"):
        is_sum = name == "reduce_sum" or contracts_rows(eqn, in_axes)
        return RowEffect.SUM if is_sum else RowEffect.MIXED
    if name in ELEMENTWISE:
        is_equal = name != "integer_pow" or eqn.params["y"] == twin.params["y"]
        is_aligned = all(axis in (None, out_axes[0]) for axis in in_axes)
        keeps = (is_equal and is_aligned) or None
    else:
        keeps = keeps_rows(eqn, in_axes, out_axes)
    if keeps is None:
        return RowEffect.UNKNOWN
    return RowEffect.ROWS if keeps else RowEffect.MIXED


def _of_totals(name: str, labels: list[Any]) -> Any:
    """Returns the effect of an operation on sums, means, counts and inputs."""
    given = [label for label in labels if label is not RowEffect.FREE]
    inputs = [label for label in given if isinstance(label, tuple)]
    if inputs:
        return _of_inputs(name, labels, inputs)
    if len(given) == 1 and _is_linear(name, labels):
        return given[0]
    is_sum = name in ("add", "sub")
    if is_sum and len(given) == 2 and set(given) <= _SUMS:
        return RowEffect.SUM
    if is_sum and set(given) == {RowEffect.MEAN}:  # an added constant counts once per row
        return RowEffect.MEAN
    is_mean = name == "div" and given == [RowEffect.SUM, RowEffect.COUNT]
    return RowEffect.MEAN if is_mean else RowEffect.MIXED


def _of_inputs(name: str, labels: list[Any], inputs: list[Any]) -> Any:
    """Returns the effect of an operation on an input without rows, such as metric state."""
    if len(labels) == 1 and name in ("convert_element_type", "copy"):
        return inputs[0]
    rest = [label for label in labels if not isinstance(label, tuple)]
    is_added = name == "add" or (name == "sub" and isinstance(labels[0], tuple))
    if is_added and len(rest) == 1 and rest[0] in _SUMS:
        return RowEffect.INPUT_PLUS_SUM, inputs[0][1]
    return RowEffect.UNKNOWN


def _is_linear(name: str, labels: list[Any]) -> bool:
    """True if an operation only moves one total, or multiplies it by a constant."""
    is_multiplied = name == "mul" or (name == "div" and labels[0] is not RowEffect.FREE)
    return is_multiplied or (name in LINEAR and len(labels) == 1)


# Which primitives keep the rows of a batch independent.

_WITHIN_AXES = {
    *("argmax", "argmin", "concatenate", "cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum"),
    *("reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_prod", "reduce_sum"),
    *("reduce_xor", "rev", "sort", "split", "squeeze"),
}
_AXES = {"axes", "axis", "dimension", "dimensions", "concatenate_dimension"}


def keeps_rows(eqn: JaxprEqn, in_axes: list[int | None], out_axes: list[int | None]) -> bool | None:
    """Returns True if each row of the results depends on the same row only; None if unknown.

    Axes are the row axis of each input and result, or None; at least one input has rows.
    """
    name = eqn.primitive.name
    if name in _WITHIN_AXES:
        return not {axis for axis in in_axes if axis is not None} & axes_of(eqn)
    rule = _RULES.get(name)
    if rule is None or any(axis is None for axis in out_axes):
        return None
    return rule(eqn, in_axes, out_axes)


def contracts_rows(eqn: JaxprEqn, in_axes: list[int | None]) -> bool:
    """True if a product without rows in its result sums over the rows of both factors."""
    (left, right), _ = eqn.params["dimension_numbers"]
    return (in_axes[0], in_axes[1]) in set(zip(left, right, strict=True))


def axes_of(eqn: JaxprEqn) -> set[int]:
    """Returns the axes that an operation works along."""
    values = [eqn.params[key] for key in _AXES & set(eqn.params)]
    return {axis for one in values for axis in ([one] if isinstance(one, int) else one)}


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
