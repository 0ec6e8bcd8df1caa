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

from stratagem.execution.jaxprs import (
    CALLS,
    ELEMENTWISE,
    free_variables,
    inner_jaxprs,
    leading_to,
    retrace,
    spliced,
    variables_in,
    without_unused,
)
from stratagem.execution.replication import differing_values, is_replicated_work
from stratagem.execution.row_effects import LINEAR

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
_CHEAP = ELEMENTWISE | LINEAR | {*CALLS} | set(_ALSO_CHEAP.split())


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
    stays = set(variables_in(_kept(jaxpr.outvars, [not may for may in may_update])))
    eqns: list[Any] = []
    for eqn in reversed(jaxpr.eqns):
        is_needed = [variable in stays for variable in eqn.outvars]
        splits = eqn.primitive.name == "cond" and is_replicated_work(eqn, differs)
        if not splits or all(is_needed):
            eqns.append(eqn)
            stay = any(is_needed) or not is_replicated_work(eqn, differs)
            stays.update(variables_in(eqn.invars) if stay else ())
            continue
        eqns += _selections(_with_outputs(eqn, [not flag for flag in is_needed]))[::-1]
        if any(is_needed):
            eqns.append(_with_outputs(eqn, is_needed))
            stays.update(variables_in(eqns[-1].invars))
    return jaxpr.replace(eqns=eqns[::-1])


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
    return spliced(eqn, lambda *inputs: _selected(eqn, [*inputs]))


def _selected(eqn: JaxprEqn, inputs: list[Any], *_: bool) -> list[Any]:
    index, *operands = inputs
    branches = [
        retrace(branch, operands, rules={"cond": _selected}) for branch in eqn.params["branches"]
    ]
    return [jax.lax.select_n(index, *values) for values in zip(*branches, strict=True)]


def _is_cheap(jaxpr: Jaxpr) -> bool:
    return all(
        eqn.primitive.name in _CHEAP and all(map(_is_cheap, inner_jaxprs(eqn)))
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
    made = {variable for eqn in moved for variable in eqn.outvars}
    is_updated = [
        may and not isinstance(atom, Literal) and atom in made
        for atom, may in zip(jaxpr.outvars, may_update, strict=True)
    ]
    # The replica part overwrites these inputs before the update runs.
    is_gone = {index for output, index in (old_values or {}).items() if not is_updated[output]}
    places = {
        variable: index for index, variable in enumerate(jaxpr.invars) if index not in is_gone
    }
    needed = free_variables(moved)
    handed = [variable for variable in needed if variable not in places]
    number = {variable: index for index, variable in enumerate(handed)}
    is_moved = {id(eqn) for eqn in moved}
    outputs = list(zip(jaxpr.outvars, is_updated, strict=True))
    return StepParts(
        replica=jaxpr.replace(
            eqns=[eqn for eqn in jaxpr.eqns if id(eqn) not in is_moved],
            outvars=[*(atom for atom, updated in outputs if not updated), *handed],
        ),
        update=jaxpr.replace(
            eqns=moved,
            invars=needed,
            outvars=[atom for atom, updated in outputs if updated],
        ),
        update_inputs=[
            ("input", places[one]) if one in places else ("handed", number[one]) for one in needed
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
    others = _kept(jaxpr.outvars, [not may for may in may_update])
    eqns = leading_to(jaxpr.eqns, others, lambda eqn: not is_replicated_work(eqn, differs))
    stays = set(map(id, eqns))
    return [eqn for eqn in jaxpr.eqns if id(eqn) not in stays]
