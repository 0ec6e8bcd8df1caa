"""Operations that compute each element of their result from the same elements of their inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from stratagem.execution.analysis.replication import inner_jaxprs

if TYPE_CHECKING:
    from jax.extend.core import JaxprEqn


_BY_ELEMENT = frozenset(
    [
        *("abs", "add", "and", "ceil", "clamp", "convert_element_type", "copy", "cos", "div", "eq"),
        *("erf", "exp", "expm1", "floor", "ge", "gt", "integer_pow", "is_finite", "le", "log"),
        *("log1p", "logistic", "lt", "max", "min", "mul", "ne", "neg", "not", "or", "pow"),
        *("reduce_precision", "rem", "round", "rsqrt", "select_n", "sign", "sin", "sqrt", "square"),
        *("stop_gradient", "sub", "tanh", "xor"),
    ]
)
_CALLS = frozenset(["closed_call", "custom_jvp_call", "custom_vjp_call", "jit", "pjit"])


def is_by_element(eqn: JaxprEqn, *, also: Sequence[str] = ()) -> bool:
    """Returns True for an elementwise operation, or a call of elementwise operations only.

    `also` names primitives that the caller deals with.
    """
    if eqn.primitive.name not in _CALLS:
        return eqn.primitive.name in _BY_ELEMENT or eqn.primitive.name in also
    inner = [jaxpr for value in eqn.params.values() for jaxpr in inner_jaxprs(value)]
    return all(is_by_element(one, also=also) for jaxpr in inner for one in jaxpr.eqns)
