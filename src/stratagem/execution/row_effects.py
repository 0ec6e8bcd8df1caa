"""Row effects: a result may depend on a batch row by row, be a sum or mean over rows, or mix rows.

The function is traced with two numbers of rows, and a pass over both traces labels each value. An
axis whose size differs holds rows; a literal that grows with them is a count. Every label except
MIXED and UNKNOWN is a proof.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.extend.core import Literal

from stratagem.execution.jaxprs import ELEMENTWISE, called_jaxpr, labeled, scan_counts, shape_of

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr, JaxprEqn, Var

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


# Row degrees: how a value grows with the number of rows of a batch.
#
# A mean over rows has degree 0, a sum 1, its inverse -1; rows themselves have that of each row. Two
# traces of a function with unlike numbers of rows are walked side by side: sizes and constants that
# differ come from the number of rows.
#
# Row effects are another analysis, as neither answer follows from the other: an effect proves what
# each row depends on, and ends at loops, branches and gradients. A degree says how a number grows
# whatever rows it mixes, and follows all of these.


_JOINING = {"add", "sub", "add_any", "max", "min", "concatenate", "clamp", "pad", "select_n"}
_KEEPING = {
    *("abs", "broadcast_in_dim", "conj", "convert_element_type", "copy", "copy_p", "cummax"),
    *("cummin", "dynamic_slice", "expand_dims", "gather", "imag", "neg", "optimization_barrier"),
    *("real", "reduce_max", "reduce_min", "reduce_precision", "reduce_window_max"),
    *(
        "reduce_window_sum",
        "reshape",
        "reshard",
        "sharding_constraint",
        "rev",
        "select_and_gather_add",
        "select_and_scatter_add",
    ),
    *("slice", "split", "squeeze", "stop_gradient", "transpose"),
}
_INVARIANT = {
    *("and", "argmax", "argmin", "eq", "ge", "gt", "iota", "is_finite", "le", "lt", "ne", "not"),
    *("or", "random_bits", "random_fold_in", "random_seed", "random_split", "random_unwrap"),
    *("random_wrap", "reduce_and", "reduce_or", "rng_bit_generator", "sign", "threefry2x32"),
    "xor",
}
_INDEXED = {"dynamic_slice", "gather", "select_and_gather_add", "select_and_scatter_add"}
_LINEAR = {"add", "sub", "add_any", "concatenate", "cond", "pad", "reduce_sum", "select_n"}
_UPDATING = {"dynamic_update_slice": 1, "scatter": 2, "scatter-add": 2, "scatter_add": 2}
_POWERS = {"square": 2.0, "sqrt": 0.5, "rsqrt": -0.5, "cbrt": 1 / 3}
_REDUCING = {
    *("argmax", "argmin", "cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum"),
    *("reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_prod", "reduce_sum"),
    *("sort", "top_k"),
}


_SMALL = 1e-3


class _Source(enum.IntEnum):
    """Origin of a value: no rows of the batch, its rows, or totals over them."""

    NO_ROWS = 0
    ROWS = 1
    TOTAL = 2  # of all rows


@dataclasses.dataclass(frozen=True)
class _Label:
    """Degree and source of a value; `is_constant` if it follows from no input."""

    degree: float = 0.0
    source: _Source = _Source.NO_ROWS
    is_constant: bool = False
    is_small: bool = False  # as what is added to a divisor that may be zero

    @property
    def is_total(self) -> bool:
        return self.source is _Source.TOTAL and not self.is_constant


_ZERO = _Label(math.inf, is_constant=True)  # of any degree
_UNKNOWN = _Label(math.nan)
_LOST = _Label(-math.inf)

MIXED = -math.inf
"""Degree of a sum of terms that grow with the rows and others that don't."""

SUM_OVER_REPLICAS = "stratagem_sum_over_replicas"
"""Name scope of an operation that stands for a sum over replicas, of its operand."""


@dataclasses.dataclass(frozen=True)
class RowDegrees:
    """Degree of each result, None if it is not known, and operations that combine rows.

    `mixing` are those whose result is no sum or mean over rows, nor made of such by adding, and
    `summed_means` sums over replicas of means over rows. Operations of gradients are left out: they
    are right where the rest is.
    """

    degrees: list[float | None]
    combining: list[JaxprEqn]
    mixing: list[JaxprEqn]
    summed_means: list[JaxprEqn]


def row_degrees(traces: Sequence[ClosedJaxpr], sizes: tuple[int, int]) -> RowDegrees:
    """Analyzes two traces of a function, with `sizes` rows."""
    walk = _Walk(math.log(sizes[1] / sizes[0]))
    inputs = zip(*(trace.jaxpr.invars for trace in traces), strict=True)
    given = [_Label(0.0, _Source.ROWS if row_axes(*pair) else _Source.NO_ROWS) for pair in inputs]
    labels = walk.results(traces, given, in_gradient=False)
    degrees = [
        None if math.isnan(label.degree) or label is _ZERO else label.degree for label in labels
    ]
    return RowDegrees(degrees, walk.combining, walk.mixing, walk.summed_means)


class _Walk:
    def __init__(self, log_ratio: float) -> None:
        self._log_ratio = log_ratio
        self.combining: list[JaxprEqn] = []
        self.mixing: list[JaxprEqn] = []
        self.summed_means: list[JaxprEqn] = []

    def results(
        self, traces: Sequence[Any], inputs: Sequence[_Label], *, in_gradient: bool
    ) -> list[_Label]:
        """Returns the labels of the results of one function, given those of its inputs."""
        return labeled(
            traces,
            inputs,
            of_constants=self._of_constants,
            of_operation=functools.partial(self._of_equations, in_gradient=in_gradient),
            if_unlike=_UNKNOWN,
        )

    def _of_constants(self, atom: Var | Literal, twin: Var | Literal) -> _Label:
        if not isinstance(atom, Literal):
            return _Label()
        if not isinstance(twin, Literal):
            return _UNKNOWN
        one, other = np.asarray(atom.val).item(), np.asarray(twin.val).item()
        if one == other or (one != one and other != other):
            if one == 0:
                return _ZERO
            return _Label(0.0, is_constant=True, is_small=abs(one) < _SMALL)
        if isinstance(one, complex) or one * other <= 0 or not math.isfinite(one * other):
            return _UNKNOWN
        degree = math.log(other / one) / self._log_ratio
        is_power = math.isclose(2 * degree, round(2 * degree), abs_tol=1e-3)
        if not is_power:
            return _UNKNOWN
        return _Label(round(2 * degree) / 2, _Source.TOTAL, is_constant=True)

    def _of_equations(
        self, eqns: Sequence[JaxprEqn], labels: list[_Label], *, in_gradient: bool
    ) -> list[_Label]:
        eqn, twin = eqns
        name, count = eqn.primitive.name, len(eqn.outvars)
        scopes = str(eqn.source_info.name_stack)
        in_gradient = in_gradient or "transpose" in scopes
        if SUM_OVER_REPLICAS in scopes and labels[0].is_total and labels[0].degree == 0:
            self.summed_means.append(eqn)
        if called_jaxpr(eqn) is not None:
            inner = [called_jaxpr(each) for each in (eqn, twin)]
            return self.results(inner, labels, in_gradient=in_gradient)
        if name == "scan":
            return self._of_scan(eqn, twin, labels, in_gradient=in_gradient)
        if name == "cond":
            branches = [
                self.results(pair, labels[1:], in_gradient=in_gradient)
                for pair in zip(eqn.params["branches"], twin.params["branches"], strict=True)
            ]
            return [_joined("cond", each) for each in zip(*branches, strict=True)]
        axes = [row_axes(*pair) for pair in zip(eqn.invars, twin.invars, strict=True)]
        out_axes = [row_axes(*pair) for pair in zip(eqn.outvars, twin.outvars, strict=True)]
        if not in_gradient and self._combines(eqn, axes):
            self.combining.append(eqn)
            if name not in ("reduce_sum", "dot_general"):
                self.mixing.append(eqn)
        elif not in_gradient and (_mixes(name, labels) or any(len(one) > 1 for one in out_axes)):
            self.mixing.append(eqn)
        if _UNKNOWN in labels:
            return [_UNKNOWN] * count
        return [_degree_of_operation(eqn, twin, labels, axes)] * count

    def _combines(self, eqn: JaxprEqn, axes: list[list[int]]) -> bool:
        """Returns True for an operation whose result for all rows depends on each of them."""
        name = eqn.primitive.name
        if name == "dot_general":
            return _contracts(eqn, axes)
        if name not in _REDUCING or not axes or not axes[0]:
            return False
        return bool(set(axes[0]) & axes_of(eqn))

    def _of_scan(
        self, eqn: JaxprEqn, twin: JaxprEqn, labels: list[_Label], *, in_gradient: bool
    ) -> list[_Label]:
        num_consts, num_carry = scan_counts(eqn)
        if eqn.params["length"] != twin.params["length"]:  # it steps through the rows
            return [_UNKNOWN] * len(eqn.outvars)
        bodies = [each.params["jaxpr"] for each in (eqn, twin)]
        consts, xs = labels[:num_consts], labels[num_consts + num_carry :]
        carry = labels[num_consts : num_consts + num_carry]
        for _ in range(3):  # zero, then a degree, then the same degree
            found = len(self.combining), len(self.mixing)
            results = self.results(bodies, [*consts, *carry, *xs], in_gradient=in_gradient)
            joined = [
                _joined("scan", pair) for pair in zip(carry, results[:num_carry], strict=True)
            ]
            if joined == carry:
                return [*carry, *results[num_carry:]]
            del self.combining[found[0] :], self.mixing[found[1] :]
            carry = joined
        return [_UNKNOWN] * len(eqn.outvars)


def _mixes(name: str, labels: list[_Label]) -> bool:
    """Returns True for an operation that is not linear in the totals among its inputs."""
    totals = [label for label in labels if label.is_total]
    if not totals or name in _KEEPING or name in _INVARIANT or name in _LINEAR:
        return False
    if name in ("mul", "dot_general"):
        return sum(label.source > 0 and not label.is_constant for label in labels) > 1
    return name != "div" or labels[1].is_total


def _joined(name: str, labels: Sequence[_Label]) -> _Label:
    """Returns the label of a sum, or of one of several values."""
    given = [label for label in labels if label is not _ZERO]
    if not given:
        return _ZERO
    if _UNKNOWN in given or _LOST in given:
        return _UNKNOWN if _UNKNOWN in given else _LOST
    data = [label for label in given if not label.is_constant] or given
    adds = name in ("add", "sub", "add_any")
    # A small number, or a bound as in max(count, 1), says nothing on how a value grows.
    counted = [label for label in given if adds and not label.is_small] or data
    if not adds and data is given:  # a constant and its bound
        counted = [max(given, key=lambda label: abs(label.degree))]
    degrees = {label.degree for label in counted}
    source = max(label.source for label in data)
    if len(degrees) == 1:
        return _Label(degrees.pop(), source, all(label.is_constant for label in given))
    has_data = any(not label.is_constant for label in given)
    return _LOST if has_data and degrees == {0.0, 1.0} else _UNKNOWN


def _degree_of_operation(
    eqn: JaxprEqn, twin: JaxprEqn, labels: list[_Label], axes: list[list[int]]
) -> _Label:
    name = eqn.primitive.name
    source = max((label.source for label in labels), default=_Source.NO_ROWS)
    is_constant = all(label.is_constant for label in labels)
    if name in _INVARIANT:
        return _Label(0.0, source, is_constant)
    if name in _JOINING:
        return _joined(name, labels[1:] if name == "select_n" else labels)
    if name in _INDEXED:
        return labels[0]
    if name in _UPDATING:
        place = _UPDATING[name]
        update = labels[place]
        # Rows added up, as in the gradient of a table.
        if axes[place] and not row_axes(eqn.outvars[0], twin.outvars[0]):
            update = _summed(update)
        return _joined(name, [labels[0], update])
    if _LOST in labels:
        return _LOST
    if name in ("mul", "dot_general", "conv_general_dilated"):
        if _ZERO in labels:
            return _ZERO
        product = _Label(sum(label.degree for label in labels), source, is_constant)
        return _of_product(eqn, product, axes)
    if labels and labels[0] is _ZERO and (name in _KEEPING or name in _LINEAR or name == "div"):
        return _ZERO
    if name == "div" and _ZERO not in labels:
        return _Label(labels[0].degree - labels[1].degree, source, is_constant)
    is_unary = len(labels) == 1 and labels[0] is not _ZERO
    return _of_unary(eqn, twin, labels, axes) if is_unary else _of_function(name, labels, source)


def _of_unary(eqn: JaxprEqn, twin: JaxprEqn, labels: list[_Label], axes: list[list[int]]) -> _Label:
    name, label = eqn.primitive.name, labels[0]
    if name == "reduce_sum":
        return _summed(label) if set(axes[0]) & axes_of(eqn) else label
    if name in _KEEPING or (name == "cumsum" and not set(axes[0]) & axes_of(eqn)):
        return label
    power = _POWERS.get(name)
    if name == "integer_pow" and eqn.params["y"] == twin.params["y"]:
        power = eqn.params["y"]
    if power is not None:
        return _Label(label.degree * power, label.source, label.is_constant)
    return _of_function(name, labels, label.source)


def _of_function(name: str, labels: list[_Label], source: _Source) -> _Label:
    """Returns the label of a function of values that must not depend on the number of rows."""
    is_free = all(label is _ZERO or label.degree == 0 for label in labels)
    if not is_free or name not in ELEMENTWISE:
        return _UNKNOWN
    return _Label(0.0, source, bool(labels) and all(label.is_constant for label in labels))


def _summed(label: _Label) -> _Label:
    if label is _ZERO:
        return label
    return _Label(label.degree + 1, _Source.TOTAL, label.is_constant)


def _of_product(eqn: JaxprEqn, product: _Label, axes: list[list[int]]) -> _Label:
    if eqn.primitive.name == "dot_general" and _contracts(eqn, axes):
        return _summed(product)
    if eqn.primitive.name == "conv_general_dilated":
        numbers = eqn.params["dimension_numbers"]
        if axes[0] and axes[1] and axes[0][0] == numbers.lhs_spec[1]:  # gradient of a kernel
            return _summed(product)
        is_of_rows = not axes[1] and axes[0] in ([], [numbers.lhs_spec[0]])
        return product if is_of_rows else _UNKNOWN
    return product


def _contracts(eqn: JaxprEqn, axes: list[list[int]]) -> bool:
    in_axes = [one[0] if one else None for one in axes]
    return bool(axes[0] and axes[1]) and contracts_rows(eqn, in_axes)
