"""Split of a step's trace into a replica part and an update part.

The update follows from sums over replicas, so it is equal on all of them, and only computes
variables. It can therefore run elsewhere: once, in the variables' store, or sharded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jax.extend.core import Jaxpr, Literal

from stratagem.execution.analysis.replication import differing_values, is_replicated_work
from stratagem.execution.programs.conditional_updates import with_split_conditionals
from stratagem.execution.tracing.remote_state import without_unused


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
