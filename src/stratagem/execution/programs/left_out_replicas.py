"""Steps that may leave replicas out, which then apply the results of the others.

Such a step trains: its rows change variables by sums over replicas alone, and every row counts only
for one step. If rows count for themselves, as in a prediction, or replicas exchange them, all
replicas must take part.
"""

from __future__ import annotations

from typing import Any

from jax.extend.core import Jaxpr, Literal, Var

from stratagem.execution.analysis.replication import (
    contains_primitive,
    differing_outputs,
    inner_jaxprs,
)
from stratagem.execution.tracing.trace import Trace
from stratagem.variables.kind import VariableKind
from stratagem.variables.registry import home_of

_SUMS = ("psum", "psum_invariant", "pmax", "pmin")
_EXCHANGES = (
    "all_gather",
    "all_gather_invariant",
    "reduce_scatter",
    "all_to_all",
    "ppermute",
)
_CALLBACKS = ("io_callback", "debug_callback", "debug_print")


def own_outputs(trace: Trace) -> list[bool]:
    """Returns, for each output of a step, True if it may differ between replicas."""
    flags = differing_outputs(trace.jaxpr.jaxpr, trace.differing_inputs)
    return [
        differs or (place < len(trace.written) and _is_own(trace.written[place]))
        for place, differs in enumerate(flags)
    ]


def reason_to_wait(trace: Trace) -> str | None:
    """Returns why all replicas must take part in a step; None if some may be left out."""
    jaxpr = trace.jaxpr.jaxpr
    mirrored = [not _is_own(variable) for variable in trace.written]
    trains = [getattr(variable, "trainable", False) for variable in trace.written]
    components = [_is_component(trace, *one) for one in trace.inputs]
    has_outside = bool(trace.summaries or trace.lookups or trace.sent or trace.late)
    reasons = {
        "it trains no variable": not any(map(all, zip(mirrored, trains, strict=True))),
        "it sums nothing over replicas": not contains_primitive(jaxpr, *_SUMS),
        "replicas exchange rows in it": contains_primitive(jaxpr, *_EXCHANGES),
        "it calls functions of the host": contains_primitive(jaxpr, *_CALLBACKS),
        "it records summaries, or uses variables outside of this process": has_outside,
        "it reads what each replica has counted": _combines(jaxpr, components),
        "it gives a variable of all replicas a value that one of them has computed": any(
            differs and is_mirrored
            for differs, is_mirrored in zip(own_outputs(trace), mirrored, strict=False)
        ),
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def _is_own(variable: object) -> bool:
    home = home_of(variable)
    return home is not None and home.kind is VariableKind.ON_READ


def _is_component(trace: Trace, source: str, place: int) -> bool:
    """Returns True for the component of a variable that each replica has for itself."""
    variables = {"written": trace.written, "read_only": trace.read_only}.get(source, ())
    return bool(variables) and _is_own(variables[place])


def _combines(jaxpr: Jaxpr, flags: list[bool]) -> bool:
    """Returns True if a collective may have a flagged input among its arguments."""
    flagged = dict(zip(jaxpr.invars, flags, strict=True))

    def read(atom: Var | Literal) -> bool:
        return not isinstance(atom, Literal) and flagged.get(atom, False)

    for eqn in jaxpr.eqns:
        if not any(map(read, eqn.invars)):
            continue
        inner: list[Any] = [one for value in eqn.params.values() for one in inner_jaxprs(value)]
        if eqn.primitive.name in _SUMS or any(contains_primitive(one, *_SUMS) for one in inner):
            return True
        flagged.update((atom, True) for atom in eqn.outvars)
    return False
