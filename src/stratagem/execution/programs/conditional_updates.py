"""Conditional updates of variables, rewritten so that a step can be split in the middle of them.

Optimizers put the new values of all variables into one `lax.cond` for gradient accumulation or loss
scaling. Such an operation is in the update as a whole or not at all, and its variables would have
to be gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from stratagem.execution.analysis.replication import inner_jaxprs, is_replicated_work
from stratagem.execution.analysis.retracing import retrace
from stratagem.execution.analysis.row_rules import ELEMENTWISE, LINEAR, SUB_JAXPRS
from stratagem.execution.tracing.remote_state import without_unused

if TYPE_CHECKING:
    from jax.extend.core import JaxprEqn


# Operations that cost no more than a pass over their inputs, or contain only such operations.
_ALSO_CHEAP = "concatenate cond iota reduce_and reduce_max reduce_min reduce_or slice stack"
_CHEAP = ELEMENTWISE | LINEAR | set(SUB_JAXPRS) | set(_ALSO_CHEAP.split())


def with_split_conditionals(
    jaxpr: Jaxpr,
    differs: dict[Any, bool],  # True for a value that may differ between replicas
    may_update: Sequence[bool],  # True if an output is a variable that the update may compute
) -> Jaxpr:
    """Splits each `cond` into the part that replicas need and the part that only updates need.

    In the second part, branches without loops and products are both computed, and an element-wise
    selection chooses. The compiler fuses these with the rest of the update, which writes each new
    value in the place of the old one. Conditionals that replicas compute with stay as they are.
    """
    stays = {
        id(atom)
        for atom, may in zip(jaxpr.outvars, may_update, strict=True)
        if not may and not isinstance(atom, Literal)
    }
    eqns: list[Any] = []
    for eqn in reversed(jaxpr.eqns):
        is_needed = [id(variable) in stays for variable in eqn.outvars]
        splits = eqn.primitive.name == "cond" and is_replicated_work(eqn, differs)
        if not splits or all(is_needed):
            eqns.append(eqn)
            stay = any(is_needed) or not is_replicated_work(eqn, differs)
            stays.update(_read(eqn) if stay else ())
            continue
        eqns += _selections(_with_outputs(eqn, [not flag for flag in is_needed]))[::-1]
        if any(is_needed):
            eqns.append(_with_outputs(eqn, is_needed))
            stays.update(_read(eqns[-1]))
    return jaxpr.replace(eqns=eqns[::-1])


def _read(eqn: JaxprEqn) -> set[int]:
    return {id(atom) for atom in eqn.invars if not isinstance(atom, Literal)}


def _with_outputs(eqn: JaxprEqn, is_kept: Sequence[bool]) -> JaxprEqn:
    """Returns a `cond` that computes only some of its outputs."""
    branches: list[ClosedJaxpr] = [
        ClosedJaxpr(one.jaxpr.replace(outvars=_kept(one.jaxpr.outvars, is_kept)), one.consts)
        for one in eqn.params["branches"]
    ]
    unused = [False] * (len(eqn.invars) - 1)
    read = [without_unused(branch.jaxpr, unused)[1] for branch in branches]
    is_read = [any(flags) for flags in zip(*read, strict=True)]
    reduced = tuple(
        ClosedJaxpr(without_unused(branch.jaxpr, is_read)[0], branch.consts) for branch in branches
    )
    return eqn.replace(
        invars=[eqn.invars[0], *_kept(eqn.invars[1:], is_read)],
        outvars=_kept(eqn.outvars, is_kept),
        params={**eqn.params, "branches": reduced},
    )


def _kept(values: Sequence[Any], is_kept: Sequence[bool]) -> list[Any]:
    return [value for value, stays in zip(values, is_kept, strict=True) if stays]


def _selections(eqn: JaxprEqn) -> list[JaxprEqn]:
    """Returns operations that compute all branches of a `cond` and select; itself if costly."""
    if not all(_is_cheap(branch.jaxpr) for branch in eqn.params["branches"]):
        return [eqn]
    avals: list[Any] = [atom.aval for atom in eqn.invars]
    shapes = [jax.ShapeDtypeStruct(one.shape, one.dtype, weak_type=one.weak_type) for one in avals]
    closed = jax.make_jaxpr(lambda *inputs: _selected(eqn, [*inputs]))(*shapes)
    jaxpr = closed.jaxpr
    names: dict[Any, Any] = dict(zip(jaxpr.invars, eqn.invars, strict=True))
    names |= {
        variable: Literal(value, variable.aval)
        for variable, value in zip(jaxpr.constvars, closed.consts, strict=True)
    }
    names |= dict(zip(jaxpr.outvars, eqn.outvars, strict=True))
    return [
        one.replace(
            invars=[
                atom if isinstance(atom, Literal) else names.get(atom, atom) for atom in one.invars
            ],
            outvars=[names.get(variable, variable) for variable in one.outvars],
            source_info=eqn.source_info,
            ctx=eqn.ctx,
        )
        for one in jaxpr.eqns
    ]


def _selected(eqn: JaxprEqn, inputs: list[Any], *_: bool) -> list[Any]:
    index, *operands = inputs
    branches = [
        retrace(branch, operands, rules={"cond": _selected}) for branch in eqn.params["branches"]
    ]
    return [jax.lax.select_n(index, *values) for values in zip(*branches, strict=True)]


def _is_cheap(jaxpr: Jaxpr) -> bool:
    return all(
        eqn.primitive.name in _CHEAP
        and all(_is_cheap(one) for value in eqn.params.values() for one in inner_jaxprs(value))
        for eqn in jaxpr.eqns
    )
