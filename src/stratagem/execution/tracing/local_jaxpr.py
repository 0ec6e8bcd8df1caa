"""Extraction of the program of one replica from the trace of all replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from stratagem.devices.mesh import Topology
from stratagem.execution.tracing.remote_state import Lookup, WholeInput, without_unused

# Source of an input for an unused variable.
UNTOUCHED = ("untouched", 0)


def local_jaxpr(
    closed: ClosedJaxpr, sources: list[tuple[str, int]], topology: Topology
) -> tuple[ClosedJaxpr, list[tuple[str, int]], list[Any]]:
    """Extracts the program of one replica from `shard_map`, without unused inputs.

    Returns the program, the source of each input, and constants.
    """
    constants: list[Any] = list(closed.consts)
    origin: dict[Any, tuple[str, int]] = dict(zip(closed.jaxpr.invars, sources, strict=True))
    origin.update({var: ("constant", index) for index, var in enumerate(closed.jaxpr.constvars)})
    if topology.num_replicas == 1:
        inner = closed.jaxpr
        ordered = [*inner.constvars, *inner.invars]
        jaxpr, inputs = _without_unread(inner, ordered, [origin[var] for var in ordered])
        return jaxpr, inputs, constants
    (eqn,) = [eqn for eqn in closed.jaxpr.eqns if eqn.primitive.name == "shard_map"]
    inputs: list[tuple[str, int]] = []
    for atom in eqn.invars:
        if isinstance(atom, Literal):
            inputs.append(("constant", len(constants)))
            constants.append(atom.val)
        else:
            inputs.append(origin[atom])
    inner = eqn.params["jaxpr"]
    jaxpr, inputs = _without_unread(inner, inner.invars, inputs)
    return jaxpr, inputs, constants


def _without_unread(
    jaxpr: Jaxpr, variables: list[Any], sources: list[tuple[str, int]]
) -> tuple[ClosedJaxpr, list[tuple[str, int]]]:
    """Drops inputs for unused variables.

    The set of live variables depends on garbage collection, which differs between processes.
    """
    remaining = [pair for pair in zip(variables, sources, strict=True) if pair[1] != UNTOUCHED]
    reduced = jaxpr.replace(constvars=[], invars=[variable for variable, _ in remaining])
    return ClosedJaxpr(reduced, []), [source for _, source in remaining]


def without_unused_variables(
    jaxpr: ClosedJaxpr,
    inputs: list[tuple[str, int]],
    read_only: list[Any],
    lookups: Sequence[Lookup] = (),
) -> tuple[ClosedJaxpr, list[tuple[str, int]], list[Any], list[int]]:
    """Drops variables that no result depends on, so that they are not fetched.

    If a function only looks up rows, differentiation reads the whole table but does not use it.
    Also returns the places of the remaining lookups: unused `WholeInput`s are dropped.
    """
    owners = [place for place, lookup in enumerate(lookups) for _ in lookup.inputs]
    whole = {place for place, one in enumerate(lookups) if isinstance(one, WholeInput)}
    may_go = {("rows", index) for index, place in enumerate(owners) if place in whole}
    always_stays = [one[0] != "read_only" and one not in may_go for one in inputs]
    reduced, stays = without_unused(jaxpr.jaxpr, always_stays)
    remaining = [pair for pair, stay in zip(inputs, stays, strict=True) if stay]
    used = sorted(index for source, index in remaining if source == "read_only")
    places = {("read_only", index): place for place, index in enumerate(used)}
    gone = may_go - {*remaining}
    rows = [index for index in range(len(owners)) if ("rows", index) not in gone]
    places |= {("rows", index): place for place, index in enumerate(rows)}
    kept = [*dict.fromkeys(owners[index] for index in rows)]
    read_only = [one for index, one in enumerate(read_only) if ("read_only", index) in places]
    inputs = [(source, places.get((source, index), index)) for source, index in remaining]
    return ClosedJaxpr(reduced, jaxpr.consts), inputs, read_only, kept
