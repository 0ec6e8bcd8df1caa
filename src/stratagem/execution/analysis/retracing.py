"""Re-evaluation of a jaxpr outside the mesh it was traced in.

Values traced in a mesh are typed by it. Replaying the operations one by one lets their results
combine with arrays on other devices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

if TYPE_CHECKING:
    from jax.extend.core import JaxprEqn, Var


# Primitives that call a function, and the parameter that holds it.
CALLS = {
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


Rule = Callable[["JaxprEqn", list[Any], bool], Sequence[Any]]
"""Replaces a primitive, given its equation, its inputs, and if it is in a branch or a loop."""


def retrace(
    jaxpr: Jaxpr | ClosedJaxpr,
    inputs: Sequence[Any],
    in_place_of: Mapping[str, Callable[..., Sequence[Any]]] | None = None,
    rules: Mapping[str, Rule] | None = None,
    *,
    is_inside: bool = False,
) -> list[Any]:
    """Evaluates a jaxpr as if its operations had been written here.

    `in_place_of` maps the name of an inner function to its replacement, which returns a list.
    `rules` replace primitives by name, also in inner jaxprs. `is_inside` is True for the jaxpr of a
    branch or a loop.
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
        if other is None:
            results = _evaluated(eqn, own_inputs, _Inner(rules or {}, is_inside))
        else:
            results = other(*own_inputs)
        values.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


class _Inner(NamedTuple):
    """The rules for jaxprs inside of an equation."""

    rules: Mapping[str, Rule]
    is_inside: bool

    def retrace(self, jaxpr: Any, inputs: Sequence[Any], *, branches: bool = True) -> list[Any]:
        return retrace(jaxpr, inputs, rules=self.rules, is_inside=self.is_inside or branches)


def _evaluated(eqn: JaxprEqn, inputs: list[Any], inner: _Inner) -> Sequence[Any]:
    name, params = eqn.primitive.name, eqn.params
    if name in inner.rules:
        return inner.rules[name](eqn, inputs, inner.is_inside)
    if name in CALLS and CALLS[name] in params:
        return inner.retrace(params[CALLS[name]], inputs, branches=False)
    if name in _CONTROL:
        return _CONTROL[name](eqn, inputs, inner)
    if name == "reshard":  # changes only the type of a value in its mesh
        return inputs
    if name == "call_hi_primitive":  # since JAX 0.12: composed of other primitives
        return jax.tree.leaves(params["_prim"].expand(*inputs))
    if name != "sharding_constraint":  # others name the mesh of the trace
        params = {key: None if key in _TYPED else value for key, value in params.items()}
    results = eqn.primitive.bind(*inputs, **params)
    return results if eqn.primitive.multiple_results else [results]


def _choice(eqn: JaxprEqn, inputs: list[Any], inner: _Inner) -> Sequence[Any]:
    index, *operands = inputs
    branches = [_as_function(branch, inner) for branch in eqn.params["branches"]]
    return jax.lax.switch(index, branches, *operands)


def _as_function(jaxpr: ClosedJaxpr, inner: _Inner) -> Any:
    return lambda *inputs: inner.retrace(jaxpr, inputs)


def _loop(eqn: JaxprEqn, inputs: list[Any], inner: _Inner) -> Sequence[Any]:
    params = eqn.params
    num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
    of_cond, of_body = inputs[:num_cond], inputs[num_cond : num_cond + num_body]
    return jax.lax.while_loop(
        lambda carry: inner.retrace(params["cond_jaxpr"], [*of_cond, *carry])[0],
        lambda carry: inner.retrace(params["body_jaxpr"], [*of_body, *carry]),
        inputs[num_cond + num_body :],
    )


def _scan(eqn: JaxprEqn, inputs: list[Any], inner: _Inner) -> Sequence[Any]:
    params = eqn.params
    body: ClosedJaxpr = params["jaxpr"]
    num_consts, num_carry = scan_counts(eqn)
    consts, rest = inputs[:num_consts], inputs[num_consts:]

    def step(carry: list[Any], parts: list[Any]) -> tuple[list[Any], list[Any]]:
        outputs = inner.retrace(body, [*consts, *carry, *parts])
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


_CONTROL: Mapping[str, Callable[[Any, list[Any], _Inner], Sequence[Any]]] = {
    "cond": _choice,
    "scan": _scan,
    "while": _loop,
}
