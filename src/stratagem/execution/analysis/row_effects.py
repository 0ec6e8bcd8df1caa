"""Row effects: a result may depend on a batch row by row, be a sum or mean over rows, or mix rows.

The function is traced with two numbers of rows, and a pass over both traces labels each value. An
axis whose size differs holds rows; a literal that grows with them is a count. Every label except
MIXED and UNKNOWN is a proof.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal

from stratagem.execution.analysis.row_rules import (
    ELEMENTWISE,
    LINEAR,
    SUB_JAXPRS,
    contracts_rows,
    keeps_rows,
    shape_of,
)

if TYPE_CHECKING:
    from jax.extend.core import JaxprEqn, Var

    from stratagem.execution.tracing.arguments import Shaped


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
    jaxpr = jax.make_jaxpr(function)(list(map(_struct, inputs))).jaxpr
    return _inputs_added_to(jaxpr, range(len(inputs))) == [*range(len(inputs))]


# Of a value: it depends on inputs in another way than by addition.
_NOT_ADDED = -1
_PASSED_ON = {"convert_element_type", "copy", "copy_p", "reshape", "squeeze"}


def _inputs_added_to(jaxpr: Any, inputs: Sequence[int | None]) -> list[int | None]:
    """Returns the input to which each result adds; None for results that depend on none."""
    known: dict[Any, int | None] = dict(zip(jaxpr.invars, inputs, strict=True))

    def read(atom: Var | Literal) -> int | None:
        return None if isinstance(atom, Literal) else known.get(atom)

    for eqn in jaxpr.eqns:
        labels = [read(atom) for atom in eqn.invars]
        results: Sequence[int | None] = [None] * len(eqn.outvars)
        if any(label is not None for label in labels):
            results = _added_by(eqn, labels)
        known.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _added_by(eqn: JaxprEqn, labels: list[int | None]) -> Sequence[int | None]:
    """Returns the label of each result of an operation of which an operand depends on inputs."""
    name, first, rest = eqn.primitive.name, labels[0], labels[1:]
    if name in SUB_JAXPRS:
        inner = eqn.params[SUB_JAXPRS[name]]
        return _inputs_added_to(getattr(inner, "jaxpr", inner), labels)
    if name == "cond" and first is None:
        branches = [_inputs_added_to(one.jaxpr, rest) for one in eqn.params["branches"]]
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
    one, other = (trace.jaxpr if isinstance(trace, ClosedJaxpr) else trace for trace in traces)
    known: dict[Any, Any] = dict(zip(one.invars, inputs, strict=True))
    for var, twin in zip(one.constvars, other.constvars, strict=False):
        is_free = var.aval.shape == twin.aval.shape
        known[var] = RowEffect.FREE if is_free else RowEffect.UNKNOWN
    if len(one.eqns) != len(other.eqns) or len(one.constvars) != len(other.constvars):
        return [RowEffect.UNKNOWN] * len(one.outvars)

    def read(atom: Var | Literal, twin: Var | Literal) -> Any:
        return _of_literals(atom, twin) if isinstance(atom, Literal) else known[atom]

    for eqn, twin in zip(one.eqns, other.eqns, strict=True):
        if eqn.primitive is not twin.primitive:
            return [RowEffect.UNKNOWN] * len(one.outvars)
        labels = [read(*atoms) for atoms in zip(eqn.invars, twin.invars, strict=True)]
        results = _of_equation(eqn, twin, labels)
        known.update(zip(eqn.outvars, results, strict=True))
    return [read(*atoms) for atoms in zip(one.outvars, other.outvars, strict=True)]


def _of_literals(one: Literal, other: Var | Literal) -> RowEffect:
    if not isinstance(other, Literal):
        return RowEffect.UNKNOWN
    values = [float(np.real(literal.val)) for literal in (one, other)]
    if values[0] == values[1] or all(np.isnan(values)):
        return RowEffect.FREE
    is_count = np.isclose(values[0] * _NUM_ROWS[1], values[1] * _NUM_ROWS[0], rtol=1e-6)
    return RowEffect.COUNT if is_count else RowEffect.UNKNOWN


def row_axes(atom: Var | Literal, twin: Var | Literal) -> list[int]:
    """Returns the axes of a value that hold rows."""
    sizes = zip(shape_of(atom), shape_of(twin), strict=True)
    return [axis for axis, (one, other) in enumerate(sizes) if one != other]


def _of_equation(eqn: JaxprEqn, twin: JaxprEqn, labels: list[Any]) -> list[Any]:
    name = eqn.primitive.name
    if name in SUB_JAXPRS:
        inner = [one.params[SUB_JAXPRS[name]] for one in (eqn, twin)]
        return _labels(inner, labels)
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
        return _of_constants(eqn.primitive.name) if makes_rows else RowEffect.FREE
    if RowEffect.ROWS not in labels:
        return RowEffect.MIXED if makes_rows else _of_totals(eqn.primitive.name, labels)
    if any(label not in others for label in labels):
        return RowEffect.MIXED  # combines rows with a total over rows
    return _of_rows(eqn, twin, in_axes, out_axes)


def _of_constants(name: str) -> RowEffect:
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
