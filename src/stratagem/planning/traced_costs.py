"""Memory and costs of a traced step, before any compiler has seen it.

Results of *heavy* operations (products, reductions, lookups) and operands of products are arrays in
memory. Everything else is taken to be fused: it keeps the arrays alive that it is computed from. A
sum of two arrays is an array, too, so that a residual stream is one array and not all its terms.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from stratagem.execution.jaxprs import called_jaxpr, inner_jaxprs
from stratagem.planning.schedule import OperationCost

# FLOPs of the matrix products in a jaxpr.
#
# The compiler's own count leaves out products that it delegates to libraries (on GPUs), and counts
# the body of a loop once. Elementwise operations are not counted: they are memory-bound.

# Products of attention in one kernel of cuDNN, forward and backward, which computes one anew. Its
# primitives have no jaxpr inside.
_ATTENTION_PRODUCTS = {
    "dot_product_attention_fwd_wrapper": 2,
    "dot_product_attention_bwd_wrapper": 5,
}


def product_flops(jaxpr: ClosedJaxpr | Jaxpr) -> dict[str, float]:
    """Counts the FLOPs of matrix products and convolutions, by operand dtype.

    The most expensive branch of a conditional counts; a loop of unknown length counts once.
    """
    return _flops_of(getattr(jaxpr, "jaxpr", jaxpr).eqns)


def _flops_of(eqns: Iterable[Any]) -> dict[str, float]:
    total: defaultdict[str, float] = defaultdict(float)
    for eqn in eqns:
        name = eqn.primitive.name
        if name in _FLOPS:
            total[str(eqn.invars[0].aval.dtype)] += _FLOPS[name](eqn)
            continue
        parts = [product_flops(inner) for inner in inner_jaxprs(eqn)]
        if name == "cond":
            parts = [max(parts, key=lambda counted: sum(counted.values()))]
        times = eqn.params["length"] if name == "scan" else 1
        for dtype, flops in (pair for part in parts for pair in part.items()):
            total[dtype] += times * flops
    return dict(total)


def _dot_flops(eqn: Any) -> float:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    left = eqn.invars[0].aval.shape
    depth = math.prod(left[axis] for axis in contracted)
    return 2.0 * depth * math.prod(eqn.outvars[0].aval.shape)


def _conv_flops(eqn: Any) -> float:
    """Counts two FLOPs per tap that meets an element of the input, not a hole or the padding.

    The gradient of a strided convolution is a convolution over an input with holes, which
    libraries do not multiply.
    """
    numbers = eqn.params["dimension_numbers"]
    left, right = (var.aval.shape for var in eqn.invars[:2])
    out = eqn.outvars[0].aval.shape
    taps = 1
    for stride, (low, _), hole, kernel_hole, *axes in zip(
        *(eqn.params[name] for name in ("window_strides", "padding")),
        *(eqn.params[name] for name in ("lhs_dilation", "rhs_dilation")),
        *(spec[2:] for spec in (numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec)),
        strict=True,
    ):
        size, width, length = left[axes[0]], right[axes[1]], out[axes[2]]
        starts = np.arange(length)[:, None] * stride - low
        at = starts + np.arange(width) * kernel_hole
        taps *= np.count_nonzero((at >= 0) & (at <= (size - 1) * hole) & (at % hole == 0))
    batch, features = out[numbers.out_spec[0]], out[numbers.out_spec[1]]
    depth = right[numbers.rhs_spec[1]]
    return 2.0 * float(taps) * batch * features * depth


def _attention_flops(eqn: Any) -> float:
    """Counts the pairs of a query and a key that the mask leaves: half of them if it is causal."""
    queries, keys = (var.aval.shape for var in eqn.invars[:2])
    # The layout is (batch, length, heads, size), or 1 for (batch, heads, length, size).
    num_keys = keys[2 if eqn.params["layout"] == 1 else 1]
    share = 0.5 if "CAUSAL" in str(eqn.params["mask_type"]) else 1.0
    return 2.0 * share * _ATTENTION_PRODUCTS[eqn.primitive.name] * math.prod(queries) * num_keys


_FLOPS: Mapping[str, Callable[[Any], float]] = {
    "dot_general": _dot_flops,
    "conv_general_dilated": _conv_flops,
    **dict.fromkeys(_ATTENTION_PRODUCTS, _attention_flops),
}

_BODIES = {"remat2", "scan", "while", "cond"}
_PRODUCTS = {"dot_general", "conv_general_dilated"}
_HEAVY = {
    *_BODIES,
    *_PRODUCTS,
    *("gather", "scatter", "scatter-add", "scatter_add", "sort", "top_k", "argmax", "argmin"),
    *("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "cumsum", "random_bits"),
    *("reduce_window_sum", "reduce_window_max", "select_and_scatter_add", "pallas_call"),
    *_ATTENTION_PRODUCTS,
}
_SUMS = {"add", "add_any", "sub"}
_LAYOUT = {
    *("convert_element_type", "reshape", "transpose", "squeeze", "copy", "expand_dims"),
    *("name", "optimization_barrier", "reduce_precision"),
}


@dataclasses.dataclass(frozen=True)
class TracedCosts:
    """Costs of a traced step of one device.

    Args:
        operations: products and memory accesses.
        activation_bytes: most bytes of arrays at once, without gradients of weights.
        with_gradients_bytes: the same, if gradients stay until the end of the step.
        divided_share: share of these activations that the devices of a replica divide.
        summed_bytes: bytes of partial products that these devices sum.
        host_bytes: bytes that go to the memory of the host, and come back.
    """

    operations: tuple[OperationCost, ...]
    activation_bytes: float
    with_gradients_bytes: float
    divided_share: float
    summed_bytes: float
    host_bytes: float

    @property
    def flops(self) -> float:
        """FLOPs of all products."""
        return sum(one.times * one.flops for one in self.operations)


@dataclasses.dataclass
class _Array:
    """An array in memory, from one operation to another."""

    size: int
    num_bytes: float
    begin: int
    end: int
    is_divided: bool


@dataclasses.dataclass(frozen=True)
class _Value:
    """A value of the trace: arrays it is computed from, or the input that it is."""

    sources: frozenset[int] = frozenset()
    weight: int | None = None  # index of the input, unless more than its dtype was changed
    is_divided: bool = False
    is_stored: bool = True  # an array as it is, but for its layout
    is_on_host: bool = False


def trace_costs(
    jaxpr: Any,
    weights: Mapping[int, int],
    *,
    divisions: Mapping[int, frozenset[int]] | None = None,
) -> TracedCosts:
    """Returns the costs of a step of one replica.

    Args:
        jaxpr: closed jaxpr of the step.
        weights: for the index of each input that is trained, the index of its new value.
        divisions: axes of an input that the devices of a replica divide.
    """
    divided = divisions or {}
    inner = jaxpr.jaxpr
    inputs = [_Value(weight=i, is_divided=i in divided) for i in range(len(inner.invars))]
    walk = _Walk(inner, inputs, divided)
    gradients = {
        one
        for source, target in weights.items()
        for one in walk.value(inner.outvars[target]).sources
        if walk.arrays[one].size == math.prod(inner.invars[source].aval.shape)
    }
    activations, share = walk.peak(gradients, keeps_gradients=False)
    return TracedCosts(
        operations=tuple(walk.operations),
        activation_bytes=activations,
        with_gradients_bytes=walk.peak(gradients, keeps_gradients=True)[0],
        divided_share=share,
        summed_bytes=walk.summed_bytes,
        host_bytes=walk.host_bytes,
    )


class _Walk:
    """One pass over a jaxpr, with sums over all that it finds, inner jaxprs included."""

    def __init__(
        self,
        jaxpr: Any,
        inputs: Sequence[_Value],
        divisions: Mapping[int, frozenset[int]],
    ) -> None:
        self.arrays: list[_Array] = []
        self.operations: list[OperationCost] = []
        self.host_bytes = self.summed_bytes = 0.0
        self._divisions = divisions
        self._values: dict[Any, _Value] = dict(zip(jaxpr.invars, inputs, strict=True))
        self._time = 0
        self._run(jaxpr)

    def value(self, var: Any) -> _Value:
        """Returns the facts about a variable of the jaxpr."""
        return _Value() if isinstance(var, Literal) else self._values.get(var, _Value())

    def peak(self, gradients: Iterable[int], *, keeps_gradients: bool) -> tuple[float, float]:
        """Returns the most bytes at once, and the share of them that is divided."""
        kept = set(gradients)
        changes = [[0.0, 0.0] for _ in range(self._time + 2)]
        for index, one in enumerate(self.arrays):
            if index in kept and not keeps_gradients:
                continue
            end = self._time if index in kept else one.end
            # Gradients are summed in float32.
            size = max(one.num_bytes, 4 * one.size) if index in kept else one.num_bytes
            for at, sign in ((one.begin, 1), (end + 1, -1)):
                changes[at][0] += sign * size
                changes[at][1] += sign * size * one.is_divided
        most = now = divided = share = 0.0
        for all_bytes, divided_bytes in changes:
            now, divided = now + all_bytes, divided + divided_bytes
            if now > most:
                most, share = now, divided / now
        return most, share

    def _run(self, jaxpr: Any) -> None:
        for eqn in jaxpr.eqns:
            self._time += 1
            name = eqn.primitive.name
            if name not in _BODIES and (body := called_jaxpr(eqn)) is not None:
                self._inline(eqn, getattr(body, "jaxpr", body))
            elif name == "device_put":
                self._move(eqn)
            elif name in _HEAVY:
                self._compute(eqn)
            else:
                self._fuse(eqn)

    def _inline(self, eqn: Any, body: Any) -> None:
        for inner, outer in zip(body.invars, eqn.invars, strict=True):
            self._values[inner] = self.value(outer)
        self._run(body)
        for outer, inner in zip(eqn.outvars, body.outvars, strict=True):
            self._values[outer] = self.value(inner)

    def _move(self, eqn: Any) -> None:
        """Follows arrays to the host and back."""
        to_host = "host" in str(eqn.params).lower()
        for source, var in zip(eqn.invars, eqn.outvars, strict=True):
            self._use(self.value(source))
            if to_host:
                self.host_bytes += _num_bytes(var)
                self._values[var] = _Value(is_on_host=True)
            elif self.value(source).is_on_host:
                self._store(var)
            else:
                self._values[var] = self.value(source)

    def _fuse(self, eqn: Any) -> None:
        values = [self.value(var) for var in eqn.invars]
        sources = frozenset[int]().union(*(one.sources for one in values))
        has_terms = self._is_sum_of_arrays(eqn, values)
        is_layout = eqn.primitive.name in _LAYOUT
        first = values[0] if values else _Value()
        for var in eqn.outvars:
            if has_terms:
                for one in values:
                    self._use(one)
                self._store(var, is_divided=all(one.is_divided for one in values if one.sources))
                continue
            self._values[var] = _Value(
                sources,
                first.weight if eqn.primitive.name == "convert_element_type" else None,
                any(one.is_divided for one in values),
                is_layout and first.is_stored,
            )

    def _is_sum_of_arrays(self, eqn: Any, values: Sequence[_Value]) -> bool:
        """Returns True for a sum whose terms are computed from arrays of its own size."""
        if eqn.primitive.name not in _SUMS:
            return False
        size = math.prod(eqn.outvars[0].aval.shape)
        return all(any(self.arrays[i].size >= size for i in one.sources) for one in values)

    def _compute(self, eqn: Any) -> None:
        name = eqn.primitive.name
        if name in _BODIES:
            self._compute_body(eqn)
            return
        if name in _PRODUCTS:
            for var in eqn.invars:
                value = self.value(var)
                # It is computed from arrays in a fused operation, and stored for the product.
                if value.sources and not value.is_stored:
                    self._use(value)
                    self._store(var, is_divided=value.is_divided)
        values = [self.value(var) for var in eqn.invars]
        for one in values:
            self._use(one)
        is_divided = self._is_divided(eqn, values)
        flops = sum(_flops_of([eqn]).values())
        accessed = sum(map(self._read_bytes, eqn.invars)) + sum(map(_num_bytes, eqn.outvars))
        dtype = str(eqn.invars[0].aval.dtype)
        self.operations.append(OperationCost(dtype, flops, round(accessed)))
        for var in eqn.outvars:
            self._store(var, is_divided=is_divided)

    def _compute_body(self, eqn: Any) -> None:
        values = [self.value(var) for var in eqn.invars]
        for one in values:
            self._use(one)
        found: list[tuple[float, float, _Walk]] = []
        for body, offset in _bodies(eqn):
            inputs = [
                _Value(weight=one.weight, is_divided=one.is_divided, is_on_host=one.is_on_host)
                for one in values[offset : offset + len(body.invars)]
            ]
            walk = _Walk(body, inputs, self._divisions)
            found.append((*walk.peak((), keeps_gradients=False), walk))
        size, share, inner = max(found, key=lambda one: one[0])
        times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        self.host_bytes += times * inner.host_bytes
        self.summed_bytes += times * inner.summed_bytes
        self.operations += [
            dataclasses.replace(one, times=times * one.times) for one in inner.operations
        ]
        for part, is_divided in ((size * share, True), (size * (1 - share), False)):
            self.arrays.append(_Array(0, part, self._time, self._time, is_divided))
        for var in eqn.outvars:
            self._store(var)

    def _store(self, var: Any, *, is_divided: bool = False) -> None:
        array = _Array(
            math.prod(var.aval.shape), _num_bytes(var), self._time, self._time, is_divided
        )
        self.arrays.append(array)
        self._values[var] = _Value(frozenset((len(self.arrays) - 1,)), None, is_divided)

    def _use(self, value: _Value) -> None:
        for one in value.sources:
            self.arrays[one].end = self._time

    def _read_bytes(self, var: Any) -> float:
        value = self.value(var)
        if not value.sources:
            return 0.0 if isinstance(var, Literal) else _num_bytes(var)
        return sum(self.arrays[one].num_bytes for one in value.sources)

    def _is_divided(self, eqn: Any, values: Sequence[_Value]) -> bool:
        """Returns whether the devices of a replica divide a result; counts sums of parts."""
        if eqn.primitive.name == "dot_general":
            contracted, _ = eqn.params["dimension_numbers"]
            for value, axes in zip(values, contracted, strict=True):
                divided = self._divisions.get(-1 if value.weight is None else value.weight)
                if divided:
                    is_partial = not divided.isdisjoint(axes)
                    self.summed_bytes += is_partial * _num_bytes(eqn.outvars[0])
                    return not is_partial
        return any(one.is_divided for one in values)


def _bodies(eqn: Any) -> list[tuple[Any, int]]:
    """Returns jaxprs inside an operation, and the index of the operand that is their first."""
    if eqn.primitive.name == "cond":
        return [(one.jaxpr, 1) for one in eqn.params["branches"]]
    if eqn.primitive.name == "while":
        return [(eqn.params["body_jaxpr"].jaxpr, eqn.params["cond_nconsts"])]
    (body,) = inner_jaxprs(eqn)  # of a scan or of what is recomputed
    return [(body, 0)]


def _num_bytes(var: Any) -> float:
    shape, dtype = getattr(var.aval, "shape", ()), getattr(var.aval, "dtype", None)
    return math.prod(shape) * getattr(dtype, "itemsize", 4)
