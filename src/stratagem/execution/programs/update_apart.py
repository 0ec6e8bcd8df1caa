"""Programs of members that take part in a round and of those that are left out, with equal bits.

Both update variables from the same combined values, but a compiler may fuse parts of the update
with its surroundings, and round otherwise. Therefore the update is a branch of its own, from the
combined values and the inputs of the program on: XLA compiles it by itself, and alike in both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun

__all__ = ["with_update_apart"]


def with_update_apart(
    step: Callable[..., tuple[list[Any], list[Any], jax.Array]],
    arguments: Sequence[Any],
    is_updated: Sequence[bool],
    kept: Sequence[Any],
    name: str,
) -> tuple[list[Any], list[Any], jax.Array]:
    """Calls a function in a trace, with the update of values in a branch.

    Args:
        step: returns new values, other results, and True if the new values count.
        arguments: its arguments.
        is_updated: for each new value, True if the branch computes it. The others are returned as
            `step` returns them.
        kept: values in place of new ones from the branch that do not count.
        name: the primitive that combines values of several members.
    """
    closed, shapes = jax.make_jaxpr(step, return_shape=True)(*arguments)
    jaxpr, structure = closed.jaxpr, jax.tree.structure(shapes)
    updated = [
        place
        for place, (flag, atom) in enumerate(zip(is_updated, jaxpr.outvars, strict=False))
        if flag and isinstance(atom, Var)
    ]
    branch = _leading_to(jaxpr, [jaxpr.outvars[place] for place in updated], ends_at=name)
    made = {atom for eqn in branch for atom in eqn.outvars}
    updated = [place for place in updated if jaxpr.outvars[place] in made]
    others = [atom for place, atom in enumerate(jaxpr.outvars) if place not in updated]
    results: list[Any] = [jaxpr.outvars[place] for place in updated]
    given = _inputs(branch, results)
    before = jaxpr.replace(outvars=[*others, *given])
    values = list(jaxpr_as_fun(ClosedJaxpr(_needed(before), closed.consts))(*_flat(arguments)))
    others, inputs = values[: len(others)], values[len(others) :]
    update = jaxpr_as_fun(
        ClosedJaxpr(jaxpr.replace(constvars=[], invars=given, eqns=branch, outvars=results), [])
    )
    old = [kept[place] for place in updated]
    counts = others[-1]
    new = jax.lax.cond(counts, lambda: list(update(*inputs)), lambda: old)
    whole = dict(zip(updated, new, strict=True))
    rest = iter(others)
    leaves = [whole[place] if place in whole else next(rest) for place in range(len(jaxpr.outvars))]
    return jax.tree.unflatten(structure, leaves)


def _flat(arguments: Sequence[Any]) -> list[Any]:
    return jax.tree.leaves(tuple(arguments))


def _leading_to(jaxpr: Jaxpr, atoms: Sequence[Any], ends_at: str = "") -> list[JaxprEqn]:
    """Returns the equations that compute variables, in their order, from results of a primitive."""
    wanted, found = set(atoms), list[JaxprEqn]()
    for eqn in reversed(jaxpr.eqns):
        if not wanted.isdisjoint(eqn.outvars) and eqn.primitive.name != ends_at:
            wanted.update(_read(eqn))
            found.append(eqn)
    return found[::-1]


def _needed(jaxpr: Jaxpr) -> Jaxpr:
    """Returns a jaxpr with the equations that its outputs need."""
    outputs = [atom for atom in jaxpr.outvars if isinstance(atom, Var)]
    return jaxpr.replace(eqns=_leading_to(jaxpr, outputs))


def _inputs(eqns: Sequence[JaxprEqn], outputs: Sequence[Any]) -> list[Any]:
    """Returns the variables that equations and outputs take from elsewhere, in their order."""
    made = {atom for eqn in eqns for atom in eqn.outvars}
    read = [atom for eqn in eqns for atom in _read(eqn)] + [*outputs]
    return [atom for atom in dict.fromkeys(read) if atom not in made]


def _read(eqn: JaxprEqn) -> list[Var]:
    return [atom for atom in eqn.invars if not isinstance(atom, Literal)]
