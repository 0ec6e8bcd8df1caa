"""Re-evaluation of a jaxpr outside the mesh it was traced in.

Values traced in a mesh are typed by it. Replaying the operations one by one lets their results
combine with arrays on other devices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

if TYPE_CHECKING:
    from jax.extend.core import JaxprEqn, Var


__all__ = ["retrace", "scan_counts"]

# Primitives that call a function, and the parameter that holds it.
_CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
}
# Parameters that give the sharding of an operation's result.
_TYPED = ("out_sharding", "sharding")


def retrace(
    jaxpr: Jaxpr | ClosedJaxpr,
    inputs: Sequence[Any],
    in_place_of: Mapping[str, Callable[..., Sequence[Any]]] | None = None,
) -> list[Any]:
    """Evaluates a jaxpr as if its operations had been written here.

    `in_place_of` maps the name of an inner function to its replacement, which returns a list.
    """
    consts: Sequence[Any] = ()
    if isinstance(jaxpr, ClosedJaxpr):
        consts, jaxpr = jaxpr.consts, jaxpr.jaxpr
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    values.update(zip(jaxpr.invars, inputs, strict=True))

    def read(atom: Var | Literal) -> Any:
        # Literals in the trace are typed by the mesh, too.
        return np.asarray(atom.val) if isinstance(atom, Literal) else values[atom]

    others = in_place_of or {}
    for eqn in jaxpr.eqns:
        own_inputs = [read(atom) for atom in eqn.invars]
        other = others.get(eqn.params.get("name", ""))
        results = _evaluated(eqn, own_inputs) if other is None else other(*own_inputs)
        values.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _evaluated(eqn: JaxprEqn, inputs: list[Any]) -> Sequence[Any]:
    name, params = eqn.primitive.name, eqn.params
    if name in _CALLS and _CALLS[name] in params:
        return retrace(params[_CALLS[name]], inputs)
    if name in _CONTROL:
        return _CONTROL[name](eqn, inputs)
    if name == "reshard":  # changes only the type of a value in its mesh
        return inputs
    if name == "call_hi_primitive":  # since JAX 0.12: composed of other primitives
        return jax.tree.leaves(params["_prim"].expand(*inputs))
    if name != "sharding_constraint":  # others name the mesh of the trace
        params = {key: None if key in _TYPED else value for key, value in params.items()}
    results = eqn.primitive.bind(*inputs, **params)
    return results if eqn.primitive.multiple_results else [results]


def _choice(eqn: JaxprEqn, inputs: list[Any]) -> Sequence[Any]:
    index, *operands = inputs
    branches = [_as_function(branch) for branch in eqn.params["branches"]]
    return jax.lax.switch(index, branches, *operands)


def _as_function(jaxpr: ClosedJaxpr) -> Any:
    return lambda *inputs: retrace(jaxpr, inputs)


def _loop(eqn: JaxprEqn, inputs: list[Any]) -> Sequence[Any]:
    params = eqn.params
    num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
    of_cond, of_body = inputs[:num_cond], inputs[num_cond : num_cond + num_body]
    return jax.lax.while_loop(
        lambda carry: retrace(params["cond_jaxpr"], [*of_cond, *carry])[0],
        lambda carry: retrace(params["body_jaxpr"], [*of_body, *carry]),
        inputs[num_cond + num_body :],
    )


def _scan(eqn: JaxprEqn, inputs: list[Any]) -> Sequence[Any]:
    params = eqn.params
    inner: ClosedJaxpr = params["jaxpr"]
    num_consts, num_carry = scan_counts(eqn)
    consts, rest = inputs[:num_consts], inputs[num_consts:]

    def step(carry: list[Any], parts: list[Any]) -> tuple[list[Any], list[Any]]:
        outputs = retrace(inner, [*consts, *carry, *parts])
        return outputs[:num_carry], outputs[num_carry:]

    carry, stacked = jax.lax.scan(
        step,
        rest[:num_carry],
        rest[num_carry:],
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*carry, *stacked]


def scan_counts(eqn: JaxprEqn) -> tuple[int, int]:
    """Returns the numbers of constants and carried values of a `scan`, derived from the ranks.

    JAX 0.12 renamed the parameters. A value with one row per step has one axis less inside.
    """
    inner = eqn.params["jaxpr"]
    num_carry = sum(map(_has_rank_of, eqn.outvars, inner.out_avals))
    return sum(map(_has_rank_of, eqn.invars, inner.in_avals)) - num_carry, num_carry


def _has_rank_of(atom: Any, aval: Any) -> bool:
    return atom.aval.ndim == aval.ndim


_CONTROL: Mapping[str, Callable[[Any, list[Any]], Sequence[Any]]] = {
    "cond": _choice,
    "scan": _scan,
    "while": _loop,
}
