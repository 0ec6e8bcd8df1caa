"""Replication analysis: finds results of a traced replica function that are equal on all replicas.

A forward pass over the jaxpr: an output may differ between replicas if an input may. Sums and
gathers over replicas are equal everywhere, the replica id differs, unknown operations may differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jax.extend.core import Jaxpr, Literal, Var

from stratagem.devices.all_reduce import is_sum_over_replicas
from stratagem.execution.jaxprs import contains_primitive, inner_jaxprs, scan_counts

if TYPE_CHECKING:
    from jax.extend.core import JaxprEqn

_COMBINING = {
    "psum",
    "psum2",
    "psum_invariant",
    "pmax",
    "pmin",
    "all_gather",
    "all_gather_invariant",
}
_DISTINGUISHING = {
    "axis_index",
    "reduce_scatter",
    "ppermute",
    "all_to_all",
    "infeed",
    "rng_uniform",
}


_REFERENCES = {"addupdate", "get", "swap"}
_MEETING = _COMBINING | {"reduce_scatter", "ppermute", "all_to_all"}
_OF_REPLICAS = _MEETING | {"axis_index"}


class _DivergenceError(Exception):
    """Replicas may take different branches, one of which contains a collective."""


def may_wait_for_ever(jaxpr: Jaxpr, differing_inputs: Sequence[bool]) -> bool:
    """True if a collective is in a branch or loop chosen by a value that may differ by replica."""
    if not _has_meeting_branch(jaxpr):
        return False
    try:
        differing_outputs(jaxpr, differing_inputs)
    except _DivergenceError:
        return True
    return False


def _has_meeting_branch(jaxpr: Jaxpr) -> bool:
    """True if any branch or loop contains a collective."""
    for eqn in jaxpr.eqns:
        inner = inner_jaxprs(eqn)
        if eqn.primitive.name in ("cond", "while"):
            if any(contains_primitive(one, *_MEETING) for one in inner):
                return True
        elif any(_has_meeting_branch(one) for one in inner):
            return True
    return False


def _check_meeting(eqn: JaxprEqn) -> None:
    """Raises if a branch or loop with a divergent predicate contains a collective."""
    if any(contains_primitive(one, *_MEETING) for one in inner_jaxprs(eqn)):
        raise _DivergenceError


def differing_outputs(jaxpr: Jaxpr, differing_inputs: Sequence[bool]) -> list[bool]:
    """Returns one flag per output: True if it may differ between replicas."""
    differs = differing_values(jaxpr, differing_inputs)
    return [not isinstance(atom, Literal) and differs.get(atom, False) for atom in jaxpr.outvars]


def is_replicated_work(eqn: JaxprEqn, differs: Mapping[Any, bool]) -> bool:
    """True for an operation without effects that computes the same on each replica, by itself.

    `differs` is the result of `differing_values`.
    """
    if eqn.effects or eqn.primitive.name in _OF_REPLICAS:
        return False
    if any(not isinstance(atom, Literal) and differs.get(atom, False) for atom in eqn.invars):
        return False
    return not any(contains_primitive(jaxpr, *_OF_REPLICAS) for jaxpr in inner_jaxprs(eqn))


def differing_values(jaxpr: Jaxpr, differing_inputs: Sequence[bool]) -> dict[Var, bool]:
    """Returns one flag per variable of the jaxpr: True if it may differ between replicas."""
    differs: dict[Var, bool] = dict(zip(jaxpr.invars, differing_inputs, strict=True))
    anything_differs = any(differing_inputs) or contains_primitive(jaxpr, *_DISTINGUISHING)

    def read(atom: Var | Literal) -> bool:
        return False if isinstance(atom, Literal) else differs.get(atom, False)

    for eqn in jaxpr.eqns:
        inputs = [read(atom) for atom in eqn.invars]
        if eqn.primitive.name in _REFERENCES:  # the first input is the reference
            reference: Any = eqn.invars[0]
            differs[reference] = any(inputs)
            flags = [any(inputs)] * len(eqn.outvars)
        elif _is_not_followed(eqn):
            differs.update((atom, anything_differs) for atom in eqn.invars if isinstance(atom, Var))
            flags = [anything_differs] * len(eqn.outvars)
        else:
            flags = _eqn_outputs(eqn, inputs)
        differs.update(zip(eqn.outvars, flags, strict=True))
    return differs


def _is_not_followed(eqn: JaxprEqn) -> bool:
    """True for host callbacks and for references changed in an inner jaxpr."""
    return eqn.primitive.name == "io_callback" or any(
        contains_primitive(jaxpr, *_REFERENCES) for jaxpr in inner_jaxprs(eqn)
    )


def _eqn_outputs(eqn: JaxprEqn, inputs: list[bool]) -> list[bool]:
    name = eqn.primitive.name
    if name in _DISTINGUISHING:
        return [True] * len(eqn.outvars)
    if is_sum_over_replicas(eqn):
        return [False] * len(eqn.outvars)
    if name in _COMBINING:
        grouped = eqn.params.get("axis_index_groups") is not None
        return [grouped and any(inputs)] * len(eqn.outvars)
    if name in _CONTROL_FLOW:
        return _CONTROL_FLOW[name](eqn, inputs)
    inner = inner_jaxprs(eqn)
    if (
        len(inner) == 1
        and len(inner[0].invars) == len(inputs)
        and len(inner[0].outvars) == len(eqn.outvars)
    ):
        return differing_outputs(inner[0], inputs)
    may_differ = any(inputs) or any(contains_primitive(jaxpr, *_DISTINGUISHING) for jaxpr in inner)
    return [may_differ] * len(eqn.outvars)


def _cond_outputs(eqn: JaxprEqn, inputs: list[bool]) -> list[bool]:
    if inputs[0]:
        _check_meeting(eqn)
        return [True] * len(eqn.outvars)
    branches = [differing_outputs(branch.jaxpr, inputs[1:]) for branch in eqn.params["branches"]]
    return [any(flags) for flags in zip(*branches, strict=True)]


def _scan_outputs(eqn: JaxprEqn, inputs: list[bool]) -> list[bool]:
    num_consts, num_carry = scan_counts(eqn)
    consts, carry, xs = (
        inputs[:num_consts],
        inputs[num_consts : num_consts + num_carry],
        inputs[num_consts + num_carry :],
    )
    while True:
        outputs = differing_outputs(eqn.params["jaxpr"].jaxpr, [*consts, *carry, *xs])
        widened = [old or new for old, new in zip(carry, outputs[:num_carry], strict=True)]
        if widened == carry:
            return [*carry, *outputs[num_carry:]]
        carry = widened


def _while_outputs(eqn: JaxprEqn, inputs: list[bool]) -> list[bool]:
    cond_consts, body_consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    carry = inputs[cond_consts + body_consts :]
    while True:
        cond = differing_outputs(eqn.params["cond_jaxpr"].jaxpr, [*inputs[:cond_consts], *carry])
        if cond[0]:
            _check_meeting(eqn)
            return [True] * len(carry)
        body_inputs = [*inputs[cond_consts : cond_consts + body_consts], *carry]
        outputs = differing_outputs(eqn.params["body_jaxpr"].jaxpr, body_inputs)
        widened = [old or new for old, new in zip(carry, outputs, strict=True)]
        if widened == carry:
            return carry
        carry = widened


_CONTROL_FLOW = {"cond": _cond_outputs, "scan": _scan_outputs, "while": _while_outputs}
