"""Convolutions of a step on CPU devices, in the form that XLA:CPU computes fastest.

A trace has each convolution with its gradients as operations of their own, so replacing operations
leaves derivatives alone. Three forms are faster than XLA's own by measurement, and everything else
stays: a window of one element is a matrix product, a gradient of a kernel from many examples is a
sum over parts of the batch, and a convolution of an input smaller than its output or its kernel is
a sum of one product for each element of the kernel.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr

from stratagem import settings
from stratagem.execution.jaxprs import contains_primitive, spliced

if TYPE_CHECKING:
    from jax.extend.core import JaxprEqn

    from stratagem.devices.mesh import Topology


_CONVOLUTION = "conv_general_dilated"
_DTYPES = ("float32", "float64")
# A contraction over at least so many examples is split, in parts of the second number or more.
_MIN_EXAMPLES, _EXAMPLES_PER_PART, _MAX_PARTS = 64, 16, 8
# A gradient of a kernel has a window, the gradient of the outputs, so many times its own size.
_MIN_WINDOW = 4
# Kernels with more elements, or outputs that are less larger, are faster as one convolution.
_MAX_ELEMENTS, _MIN_GROWTH = 9, 1.2

_Function = Callable[[Any, Any], Any]


def fast_on_cpu(jaxpr: ClosedJaxpr, topology: Topology) -> ClosedJaxpr:
    """Returns a replica's jaxpr with fast convolutions if it runs on one CPU device."""
    # Several devices of a replica share each array, and parts of its batch would be sent around.
    if topology.platform != "cpu" or topology.groups is not None:
        return jaxpr
    return with_fast_convolutions(jaxpr) if settings.read("fast_convolutions") else jaxpr


def with_fast_convolutions(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """Returns a jaxpr with the same results in which convolutions are fast on CPU."""
    return ClosedJaxpr(_replaced(jaxpr.jaxpr), jaxpr.consts)


def _replaced(jaxpr: Jaxpr) -> Jaxpr:
    if not contains_primitive(jaxpr, _CONVOLUTION):
        return jaxpr
    eqns: list[JaxprEqn] = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == _CONVOLUTION:
            function = _fast_function(eqn)
            eqns += [eqn] if function is None else spliced(eqn, function)
        else:
            params = {name: _with_inner(value) for name, value in eqn.params.items()}
            eqns.append(eqn.replace(params=params))
    return jaxpr.replace(eqns=eqns)


def _with_inner(value: Any) -> Any:
    """Returns a parameter of an operation with convolutions replaced in its jaxprs."""
    if isinstance(value, ClosedJaxpr):
        return with_fast_convolutions(value)
    if isinstance(value, Jaxpr):
        return _replaced(value)
    if type(value) in (tuple, list):
        return type(value)(_with_inner(item) for item in value)
    return value


def _fast_function(eqn: JaxprEqn) -> _Function | None:
    """Returns a faster function of both operands, or None."""
    convolution = _Convolution(eqn)
    if not convolution.is_plain:
        return None
    if convolution.is_pointwise:
        return convolution.product
    if convolution.has_whole_window:
        return convolution.product_of_windows
    if convolution.num_parts > 1:
        return convolution.sum_of_parts
    if convolution.spreads:
        return convolution.sum_over_kernel
    return None


class _Convolution:
    """One convolution: its sizes, and other ways to compute it."""

    def __init__(self, eqn: JaxprEqn) -> None:
        self._eqn, params = eqn, eqn.params
        avals: list[Any] = [atom.aval for atom in (*eqn.invars, *eqn.outvars)]
        left, right, out = avals
        numbers = params["dimension_numbers"]
        self._left, self._right, self._out = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
        self._size = [left.shape[axis] for axis in self._left[2:]]
        self._window = [right.shape[axis] for axis in self._right[2:]]
        self._out_size = [out.shape[axis] for axis in self._out[2:]]
        self._num_features = left.shape[self._left[1]]  # examples, in a gradient of a kernel
        self._strides, self._padding = params["window_strides"], params["padding"]
        self._spread, self._gaps = params["lhs_dilation"], params["rhs_dilation"]
        self._precision = params["precision"]
        groups = params["feature_group_count"], params["batch_group_count"]
        self.is_plain = (
            groups == (1, 1)
            and {str(one.dtype) for one in (left, right, out)} <= set(_DTYPES)
            and left.dtype == right.dtype == out.dtype
            and min(*left.shape, *right.shape, *out.shape) > 0
        )

    @property
    def is_pointwise(self) -> bool:
        """True if the kernel has one element, and strides and padding are not combined."""
        return math.prod(self._window) == 1 and (
            not any(stride > 1 for stride in self._strides) or self._is_unpadded
        )

    @property
    def has_whole_window(self) -> bool:
        """True if the output has one element, computed from values of the input alone."""
        return (
            math.prod(self._out_size) == 1
            and self._is_undilated
            and all(low == 0 for low, _ in self._padding)
            and all(
                (extent - 1) * gap < size
                for extent, gap, size in zip(self._window, self._gaps, self._size, strict=True)
            )
        )

    @property
    def num_parts(self) -> int:
        """Number of parts of the batch in a gradient of a kernel; 1 for other convolutions."""
        is_gradient = math.prod(self._window) > _MIN_WINDOW * math.prod(self._out_size)
        if not is_gradient or len(self._window) != 2 or self._num_features < _MIN_EXAMPLES:
            return 1
        return min(_MAX_PARTS, self._num_features // _EXAMPLES_PER_PART)

    @property
    def spreads(self) -> bool:
        """True if a small kernel is larger than the input, or makes a larger output of it."""
        # XLA exchanges a kernel with a smaller input, and has no fast code for the result.
        size, window = math.prod(self._size), math.prod(self._window)
        return (
            window <= _MAX_ELEMENTS
            and (window > size or math.prod(self._out_size) >= _MIN_GROWTH * size)
            and all(stride == 1 for stride in self._strides)
        )

    @property
    def _is_undilated(self) -> bool:
        return all(spread == 1 for spread in self._spread)

    @property
    def _is_unpadded(self) -> bool:
        return self._is_undilated and all(pair == (0, 0) for pair in self._padding)

    def product(self, left: Any, right: Any) -> Any:
        """Convolves with a kernel of one element."""
        if any(stride > 1 for stride in self._strides):
            left = self._sliced(left, self._left, self._out_size, self._strides)
            return self._arranged(self._dot(left, self._element(right, [0] * len(self._window))))
        return self.sum_over_kernel(left, right)

    def product_of_windows(self, left: Any, right: Any) -> Any:
        """Convolves where the window is all that is used of the input."""
        left = self._sliced(left, self._left, self._window, self._gaps)
        contracted = tuple(self._left[1:]), tuple(self._right[1:])
        product = jax.lax.dot_general(
            left, right, (contracted, ((), ())), precision=self._precision
        )
        return self._arranged(product.reshape(product.shape[0], *self._out_size, product.shape[1]))

    def sum_of_parts(self, left: Any, right: Any) -> Any:
        """Convolves parts of the contracted features, and adds the results."""
        size = -(-self._num_features // self.num_parts)
        total: Any = None
        for start in range(0, self._num_features, size):
            end = min(start + size, self._num_features)
            part = self._eqn.primitive.bind(
                jax.lax.slice_in_dim(left, start, end, axis=self._left[1]),
                jax.lax.slice_in_dim(right, start, end, axis=self._right[1]),
                **self._eqn.params,
            )
            total = part if total is None else total + part
        return total

    def sum_over_kernel(self, left: Any, right: Any) -> Any:
        """Convolves with each element of the kernel alone, and adds the results in their places."""
        total: Any = None
        for places in itertools.product(*map(range, self._window)):
            product = self._dot(left, self._element(right, places))
            config = [(0, 0, 0)]
            for axis, place in enumerate(places):
                low = self._padding[axis][0] - place * self._gaps[axis]
                extent = (self._size[axis] - 1) * self._spread[axis] + 1
                high = self._out_size[axis] - low - extent
                config.append((low, high, self._spread[axis] - 1))
            placed = jax.lax.pad(product, jnp.zeros((), product.dtype), [*config, (0, 0, 0)])
            total = placed if total is None else total + placed
        return self._arranged(total)

    def _dot(self, left: Any, element: Any) -> Any:
        """Returns the product over features, with axes (batch, *spatial, features)."""
        moved = left.transpose(self._left[0], *self._left[2:], self._left[1])
        contracted = ((moved.ndim - 1,), (0,))
        return jax.lax.dot_general(
            moved, element, (contracted, ((), ())), precision=self._precision
        )

    def _element(self, right: Any, places: Any) -> Any:
        """Returns the matrix of (input features, output features) at a place in the kernel."""
        moved = right.transpose(*self._right[2:], self._right[1], self._right[0])
        return moved[tuple(places)]

    def _sliced(self, values: Any, spec: Any, sizes: Any, steps: Any) -> Any:
        """Returns every `steps`-th value of the spatial axes, `sizes` of them."""
        limits, strides = list(values.shape), [1] * values.ndim
        for axis, size, step in zip(spec[2:], sizes, steps, strict=True):
            limits[axis], strides[axis] = (size - 1) * step + 1, step
        return jax.lax.slice(values, [0] * values.ndim, limits, strides)

    def _arranged(self, values: Any) -> Any:
        """Returns (batch, *spatial, features) in the order of axes of the output."""
        order = [self._out[0], *self._out[2:], self._out[1]]
        return values.transpose([order.index(axis) for axis in range(values.ndim)])
