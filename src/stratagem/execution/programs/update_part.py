"""Split of a step's trace into a replica part and an update part.

The update follows from sums over replicas, so it is equal on all of them, and only computes
variables. It can therefore run elsewhere: once, in the variables' store, or sharded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from stratagem.execution.analysis.replication import (
    differing_values,
    inner_jaxprs,
    is_replicated_work,
)
from stratagem.execution.analysis.retracing import retrace
from stratagem.execution.analysis.row_rules import ELEMENTWISE, LINEAR, SUB_JAXPRS
from stratagem.execution.tracing.remote_state import without_unused

if TYPE_CHECKING:
    from jax.extend.core import JaxprEqn

# Conditional updates of variables, rewritten so that a step can be split in the middle of them.
#
# Optimizers put the new values of all variables into one `lax.cond` for gradient accumulation or
# loss
# scaling. Such an operation is in the update as a whole or not at all, and its variables would have
# to be gathered.

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


@dataclasses.dataclass(frozen=True)
class StepParts:
    """A step split in two. Outputs keep the order that they have in the step."""

    replica: Jaxpr  # inputs of the step; its other outputs, then values for the update
    update: Jaxpr  # its outputs are those of the step that are `is_updated`
    update_inputs: list[tuple[str, int]]  # ("input", i) of the step, ("handed", i) by `replica`
    is_updated: list[bool]  # for each output of the step
    num_handed: int  # trailing outputs of `replica` that are for the update


def part_step(
    jaxpr: Jaxpr,
    differing_inputs: Sequence[bool],  # True if an input may differ between replicas
    may_update: Sequence[bool],  # True if an output is a variable that the update may compute
    old_values: Mapping[int, int] | None = None,
) -> StepParts:
    """Splits a step; the update has no operations if none can be moved.

    `old_values` maps the output of a written variable to the input that holds its old value.
    """
    jaxpr = _prepared(jaxpr, differing_inputs, may_update)
    differs = differing_values(jaxpr, differing_inputs)
    moved = _moved(jaxpr, differs, may_update)
    made = {id(variable) for eqn in moved for variable in eqn.outvars}
    is_updated = [
        may and not isinstance(atom, Literal) and id(atom) in made
        for atom, may in zip(jaxpr.outvars, may_update, strict=True)
    ]
    # The replica part overwrites these inputs before the update runs.
    is_gone = {index for output, index in (old_values or {}).items() if not is_updated[output]}
    places = {
        id(variable): index for index, variable in enumerate(jaxpr.invars) if index not in is_gone
    }
    needed = {
        id(atom): atom
        for eqn in moved
        for atom in eqn.invars
        if not isinstance(atom, Literal) and id(atom) not in made
    }
    handed = {key: atom for key, atom in needed.items() if key not in places}
    number = {key: index for index, key in enumerate(handed)}
    is_moved = {id(eqn) for eqn in moved}
    outputs = list(zip(jaxpr.outvars, is_updated, strict=True))
    return StepParts(
        replica=jaxpr.replace(
            eqns=[eqn for eqn in jaxpr.eqns if id(eqn) not in is_moved],
            outvars=[*(atom for atom, updated in outputs if not updated), *handed.values()],
        ),
        update=jaxpr.replace(
            eqns=moved,
            invars=list(needed.values()),
            outvars=[atom for atom, updated in outputs if updated],
        ),
        update_inputs=[
            ("input", places[key]) if key in places else ("handed", number[key]) for key in needed
        ],
        is_updated=is_updated,
        num_handed=len(handed),
    )


def _prepared(jaxpr: Jaxpr, differing_inputs: Sequence[bool], may_update: Sequence[bool]) -> Jaxpr:
    """Returns a step without unused operations, and without conditionals in its update."""
    all_stay = [True] * len(jaxpr.invars)
    jaxpr, _ = without_unused(jaxpr, all_stay)
    if not any(eqn.primitive.name == "cond" for eqn in jaxpr.eqns):
        return jaxpr
    differs = differing_values(jaxpr, differing_inputs)
    jaxpr, _ = without_unused(with_split_conditionals(jaxpr, differs, may_update), all_stay)
    return jaxpr


def _moved(jaxpr: Jaxpr, differs: dict[Any, bool], may_update: Sequence[bool]) -> list[Any]:
    """Returns the operations whose results are only used for new values of variables."""
    stays = {
        id(atom)
        for atom, may in zip(jaxpr.outvars, may_update, strict=True)
        if not may and not isinstance(atom, Literal)
    }
    moved: list[Any] = []
    for eqn in reversed(jaxpr.eqns):
        stays_here = any(id(variable) in stays for variable in eqn.outvars)
        if not stays_here and is_replicated_work(eqn, differs):
            moved.append(eqn)
            continue
        stays.update(id(atom) for atom in eqn.invars if not isinstance(atom, Literal))
    return moved[::-1]
