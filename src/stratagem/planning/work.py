"""How many operations the matrix products of a step take, counted in its jaxpr.

A compiler's own count leaves out what it hands to libraries (products and convolutions on GPUs) and
counts the body of a loop once. Elementwise operations are not counted: memory bounds them.
"""

from __future__ import annotations

import math
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr

__all__ = ["product_flops"]


def product_flops(jaxpr: ClosedJaxpr | Jaxpr) -> dict[str, float]:
    """Counts the multiplications and additions of matrix products and convolutions.

    Of a branch the dearest counts; a loop whose length is not known counts once.

    Args:
        jaxpr: the program.

    Returns:
        Their number by the dtype of the operands.

    Example:
        >>> from stratagem.planning.work import product_flops
        >>> x = jax.numpy.ones((2, 3))
        >>> product_flops(jax.make_jaxpr(lambda x: x @ x.T)(x))
        {'float32': 24.0}
    """
    return _count(getattr(jaxpr, "jaxpr", jaxpr))


def _count(jaxpr: Any) -> dict[str, float]:
    total: dict[str, float] = {}
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name == "dot_general":
            _add(total, {_dtype(eqn): _dot_flops(eqn)})
        elif name == "conv_general_dilated":
            _add(total, {_dtype(eqn): _conv_flops(eqn)})
        elif name == "cond":
            branches = [_count(branch.jaxpr) for branch in eqn.params["branches"]]
            _add(total, max(branches, key=lambda counted: sum(counted.values())))
        else:
            times = eqn.params["length"] if name == "scan" else 1
            for inner in _inner(eqn.params):
                _add(total, _count(inner), times)
    return total


def _add(total: dict[str, float], counted: dict[str, float], times: int = 1) -> None:
    for dtype, flops in counted.items():
        total[dtype] = total.get(dtype, 0.0) + times * flops


def _dtype(eqn: Any) -> str:
    return str(eqn.invars[0].aval.dtype)


def _dot_flops(eqn: Any) -> float:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    left = eqn.invars[0].aval.shape
    depth = math.prod(left[axis] for axis in contracted)
    return 2.0 * depth * math.prod(eqn.outvars[0].aval.shape)


def _conv_flops(eqn: Any) -> float:
    """Two for each tap that meets an element of the input, and not a hole or the padding.

    The gradient of a convolution with strides is one over an input with holes between its elements,
    which libraries do not multiply.
    """
    numbers = eqn.params["dimension_numbers"]
    left, right = (var.aval.shape for var in eqn.invars[:2])
    out = eqn.outvars[0].aval.shape
    kernel_axes = numbers.rhs_spec[2:]
    taps = 1.0
    for place, kernel_axis in enumerate(kernel_axes):
        taps *= _meetings(
            size=left[numbers.lhs_spec[2:][place]],
            kernel=right[kernel_axis],
            out=out[numbers.out_spec[2:][place]],
            stride=eqn.params["window_strides"][place],
            low=eqn.params["padding"][place][0],
            input_step=eqn.params["lhs_dilation"][place],
            kernel_step=eqn.params["rhs_dilation"][place],
        )
    batch, features = out[numbers.out_spec[0]], out[numbers.out_spec[1]]
    depth = right[numbers.rhs_spec[1]]
    return 2.0 * taps * batch * features * depth


def _meetings(
    *, size: int, kernel: int, out: int, stride: int, low: int, input_step: int, kernel_step: int
) -> int:
    """Pairs of a place in the output and one in the kernel that meet an element of the input."""
    count = 0
    for tap in range(kernel):
        for place in range(out):
            at = place * stride + tap * kernel_step - low
            count += 0 <= at <= (size - 1) * input_step and at % input_step == 0
    return count


def _inner(params: dict[str, Any]) -> list[Any]:
    """The jaxprs among the parameters of an equation."""
    found: list[Any] = []
    for name, value in params.items():
        if name in ("fwd_jaxpr_thunk", "bwd", "jvp_jaxpr_fun"):
            continue
        for one in value if isinstance(value, tuple | list) else (value,):
            if isinstance(one, ClosedJaxpr):
                found.append(one.jaxpr)
            elif isinstance(one, Jaxpr):
                found.append(one)
    return found
