"""Small outputs of a step, such as its loss and metrics, computed as soon as their inputs are.

They need large values: the loss needs the logits. The compiler would leave them to the end, and
keep these values for as long.
"""

from __future__ import annotations

import collections
from typing import Any

from jax.extend.core import Jaxpr

from stratagem.execution.late_gathers.gradient_products import readers_of
from stratagem.execution.late_gathers.weights import is_literal

_MAX_ELEMENTS = 2**16


def is_small(atom: Any) -> bool:
    """Returns True for a value of a jaxpr that may exist to the end of a step."""
    return not is_literal(atom) and atom.aval.size <= _MAX_ELEMENTS


def with_early_outputs(jaxpr: Jaxpr) -> Jaxpr:
    """Moves operations from which only small outputs follow to right behind their inputs."""
    readers = readers_of(jaxpr)
    ending: set[int] = set()
    for eqn in reversed(jaxpr.eqns):
        reading = [(one, atom) for atom in eqn.outvars for one in readers[atom]]
        if not eqn.effects and all(
            is_small(atom) if one is None else id(one) in ending for one, atom in reading
        ):
            ending.add(id(eqn))
    places: dict[Any, int] = {}  # of the operation behind which a value exists
    moved: dict[int, list[Any]] = collections.defaultdict(list)
    for place, eqn in enumerate(jaxpr.eqns):
        if id(eqn) in ending:
            inputs = [atom for atom in eqn.invars if not is_literal(atom)]
            behind = max((places.get(atom, -1) for atom in inputs), default=-1)
            moved[behind].append(eqn)
        else:
            behind = place
        places.update(dict.fromkeys(eqn.outvars, behind))
    eqns = [*moved[-1]]
    for place, eqn in enumerate(jaxpr.eqns):
        eqns += [*([] if id(eqn) in ending else [eqn]), *moved[place]]
    return jaxpr.replace(eqns=eqns)
