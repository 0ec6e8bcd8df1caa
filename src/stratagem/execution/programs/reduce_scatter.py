"""Reduce-scatter: replaces sums over replicas where each device needs only a shard of the result.

A reduce-scatter sends half as much data as an all-reduce.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jax.extend.core import Literal

from stratagem.devices.collectives.shared_sums import is_shared_sum
from stratagem.devices.mesh import Topology
from stratagem.execution.programs.update_part import StepParts
from stratagem.variables.sharded_store import ShardedStore

if TYPE_CHECKING:
    from jax.extend.core import JaxprEqn


_SUMS = ("psum", "psum2", "psum_invariant")


def scatter_sums(
    parts: StepParts, stores: Sequence[ShardedStore | None], topology: Topology
) -> tuple[StepParts, list[int | None]]:
    """Removes sums that only the update reads, so that replicas output their addends.

    `stores` has the store of each value for the update, whose shard of a sum each device needs;
    None leaves a sum alone. Also returns the shard axis of each such value; None for other values.
    """
    jaxpr = parts.replica
    first = len(jaxpr.outvars) - parts.num_handed
    is_read = {id(atom) for eqn in jaxpr.eqns for atom in eqn.invars}
    is_read |= {id(atom) for atom in jaxpr.outvars[:first]}
    places = {id(atom): place for place, atom in enumerate(jaxpr.outvars[first:])}
    axes: list[int | None] = [None] * parts.num_handed
    outvars = list(jaxpr.outvars)
    eqns: list[Any] = []
    for eqn in jaxpr.eqns:
        stays: list[tuple[Any, Any]] = []
        pairs: list[Any] = (
            list(zip(eqn.invars, eqn.outvars, strict=True)) if _is_sum(eqn, topology) else []
        )
        for addend, total in pairs:
            place = None if id(total) in is_read else places.get(id(total))
            store = None if place is None else stores[place]
            axis = None if store is None else store.sharded_axis(tuple(total.aval.shape))
            if place is None or axis is None or isinstance(addend, Literal):
                stays.append((addend, total))
            else:
                axes[place], outvars[first + place] = axis, addend
        if len(stays) == len(pairs):
            eqns.append(eqn)
        elif stays:
            invars, totals = zip(*stays, strict=True)
            eqns.append(eqn.replace(invars=list(invars), outvars=list(totals)))
    return dataclasses.replace(parts, replica=jaxpr.replace(eqns=eqns, outvars=outvars)), axes


def _is_sum(eqn: JaxprEqn, topology: Topology) -> bool:
    if is_shared_sum(eqn):
        return True
    is_sum = eqn.primitive.name in _SUMS and eqn.params.get("axis_index_groups") is None
    return is_sum and tuple(eqn.params.get("axes", ())) == topology.replica_axes
