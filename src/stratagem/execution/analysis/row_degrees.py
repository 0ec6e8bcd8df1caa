"""Row degrees: how a value grows with the number of rows of a batch.

A mean over rows has degree 0, a sum 1, its inverse -1; rows themselves have that of each row. Two
traces of a function with unlike numbers of rows are walked side by side: sizes and constants that
differ come from the number of rows.

Row effects are another analysis, as neither answer follows from the other: an effect proves what
each row depends on, and ends at loops, branches and gradients. A degree says how a number grows
whatever rows it mixes, and follows all of these.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jax.extend.core import Literal

from stratagem.execution.analysis.row_effects import axes_of, contracts_rows, row_axes
from stratagem.execution.jaxprs import ELEMENTWISE, called_jaxpr, labeled, scan_counts

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr, JaxprEqn, Var


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
        return [_of_operation(eqn, twin, labels, axes)] * count

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


def _of_operation(
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
