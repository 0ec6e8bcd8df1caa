"""FLOPs of the matrix products in a jaxpr.

The compiler's own count leaves out products that it delegates to libraries (on GPUs), and counts
the body of a loop once. Elementwise operations are not counted: they are memory-bound.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, cast

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var

if TYPE_CHECKING:
    from jax.core import ShapedArray
    from jax.extend.core import JaxprEqn


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
    return _count_flops(getattr(jaxpr, "jaxpr", jaxpr))


def _count_flops(jaxpr: Jaxpr | ClosedJaxpr) -> dict[str, float]:
    total: dict[str, float] = {}
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name == "dot_general":
            _accumulate(total, {_dtype(eqn): _dot_flops(eqn)})
        elif name == "conv_general_dilated":
            _accumulate(total, {_dtype(eqn): _conv_flops(eqn)})
        elif name in _ATTENTION_PRODUCTS:
            _accumulate(total, {_dtype(eqn): _attention_flops(eqn)})
        elif name == "cond":
            branches = [_count_flops(branch.jaxpr) for branch in eqn.params["branches"]]
            _accumulate(total, max(branches, key=lambda counted: sum(counted.values())))
        else:
            times = eqn.params["length"] if name == "scan" else 1
            for inner in _sub_jaxprs(eqn.params):
                _accumulate(total, _count_flops(inner), times)
    return total


def _accumulate(total: dict[str, float], counted: dict[str, float], times: int = 1) -> None:
    for dtype, flops in counted.items():
        total[dtype] = total.get(dtype, 0.0) + times * flops


def _array(operand: Var | Literal) -> ShapedArray:
    return cast("ShapedArray", operand.aval)


def _dtype(eqn: JaxprEqn) -> str:
    return str(_array(eqn.invars[0]).dtype)


def _dot_flops(eqn: JaxprEqn) -> float:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    left = _array(eqn.invars[0]).shape
    depth = math.prod(left[axis] for axis in contracted)
    return 2.0 * depth * math.prod(_array(eqn.outvars[0]).shape)


def _conv_flops(eqn: JaxprEqn) -> float:
    """Counts two FLOPs per tap that meets an element of the input, not a hole or the padding.

    The gradient of a strided convolution is a convolution over an input with holes, which
    libraries do not multiply.
    """
    numbers = eqn.params["dimension_numbers"]
    left, right = (_array(var).shape for var in eqn.invars[:2])
    out = _array(eqn.outvars[0]).shape
    kernel_axes = numbers.rhs_spec[2:]
    taps = 1.0
    for index, kernel_axis in enumerate(kernel_axes):
        taps *= _num_valid_taps(
            size=left[numbers.lhs_spec[2:][index]],
            kernel=right[kernel_axis],
            out=out[numbers.out_spec[2:][index]],
            stride=eqn.params["window_strides"][index],
            low=eqn.params["padding"][index][0],
            input_step=eqn.params["lhs_dilation"][index],
            kernel_step=eqn.params["rhs_dilation"][index],
        )
    batch, features = out[numbers.out_spec[0]], out[numbers.out_spec[1]]
    depth = right[numbers.rhs_spec[1]]
    return 2.0 * taps * batch * features * depth


def _attention_flops(eqn: JaxprEqn) -> float:
    """Counts the pairs of a query and a key that the mask leaves: half of them if it is causal."""
    queries, keys = (_array(var).shape for var in eqn.invars[:2])
    # The layout is (batch, length, heads, size), or 1 for (batch, heads, length, size).
    num_keys = keys[2 if eqn.params["layout"] == 1 else 1]
    share = 0.5 if "CAUSAL" in str(eqn.params["mask_type"]) else 1.0
    return 2.0 * share * _ATTENTION_PRODUCTS[eqn.primitive.name] * math.prod(queries) * num_keys


def _num_valid_taps(
    *, size: int, kernel: int, out: int, stride: int, low: int, input_step: int, kernel_step: int
) -> int:
    """Counts pairs of output and kernel positions that meet an element of the input."""
    count = 0
    for tap in range(kernel):
        for index in range(out):
            at = index * stride + tap * kernel_step - low
            count += 0 <= at <= (size - 1) * input_step and at % input_step == 0
    return count


def _sub_jaxprs(params: dict[str, Any]) -> list[Any]:
    """Returns the jaxprs in the parameters of an equation."""
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
