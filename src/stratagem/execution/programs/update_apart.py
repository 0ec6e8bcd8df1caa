"""Update of variables from values that members have combined, as a program of its own.

Members that take part in a round and those that are left out run different programs, in which a
compiler rounds the same formula in different ways. The program of the update is the same for all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun


@dataclasses.dataclass(frozen=True)
class Update:
    """Update of variables from the inputs of a step and from what its rounds combine.

    `places` are those of its results among those of the step. `inputs` has a place for each of its
    arguments: among the flat inputs of the step, or, from their number on, among combined values.
    """

    places: tuple[int, ...]
    inputs: tuple[int, ...]
    program: Callable[[list[Any], list[Any]], list[Any]]

    def run(self, inputs: Sequence[Any], combined: Sequence[Any]) -> dict[int, Any]:
        """Returns new values by place; the old values at these places are donated."""
        given = [*inputs, *combined]
        old = [given[place] for place in self.inputs if place in self.places]
        others = [given[place] for place in self.inputs if place not in self.places]
        return dict(zip(self.places, self.program(old, others), strict=True))


def update_apart(
    step: Callable[..., Any],
    arguments: Sequence[Any],
    is_updated: Sequence[bool],
    primitive: str,
) -> tuple[Any, list[Any], Update]:
    """Calls a function in a trace, without its update.

    Args:
        step: returns a pytree, new values of variables first.
        arguments: its arguments, of which the first is the list of these variables' old values.
        is_updated: for each new value, True if it is part of the update. Then it must depend on
            the arguments and on combined values alone.
        primitive: what combines values of several members.

    Returns:
        The results of `step`, with None for each value that is updated; the combined values; and
        the update.
    """
    closed, shapes = jax.make_jaxpr(step, return_shape=True)(*arguments)
    jaxpr = closed.jaxpr
    eqns = _leading_to(
        jaxpr,
        [atom for atom, flag in zip(jaxpr.outvars, is_updated, strict=False) if flag],
        ends_at=primitive,
    )
    made = {atom for eqn in eqns for atom in eqn.outvars}
    places = [place for place, flag in enumerate(is_updated) if flag and _is_in(jaxpr, place, made)]
    given = _inputs(eqns)
    own = [atom for atom in given if atom not in jaxpr.invars]
    flat = {atom: place for place, atom in enumerate(jaxpr.invars)}
    flat |= {atom: len(jaxpr.invars) + place for place, atom in enumerate(own)}
    given.sort(key=lambda atom: flat[atom] not in places)  # stable: those to donate come first
    results: list[Any] = [jaxpr.outvars[place] for place in places]
    update = jaxpr.replace(constvars=[], invars=given, eqns=eqns, outvars=results)
    others = [atom for place, atom in enumerate(jaxpr.outvars) if place not in places]
    before = _needed(jaxpr.replace(outvars=[*others, *own]))
    values = jaxpr_as_fun(ClosedJaxpr(before, closed.consts))(*jax.tree.leaves(tuple(arguments)))
    rest = iter(values)
    leaves = [None if place in places else next(rest) for place in range(len(jaxpr.outvars))]
    whole = jax.tree.unflatten(jax.tree.structure(shapes), leaves)
    inputs = tuple(flat[atom] for atom in given)
    return whole, list(rest), Update(tuple(places), inputs, _program(update))


_programs: dict[str, Any] = {}


def _program(jaxpr: Jaxpr) -> Any:
    """Returns the compiled update, which is the same for any number of members."""
    key = str(jaxpr)
    if key not in _programs:
        function = jaxpr_as_fun(ClosedJaxpr(jaxpr, []))
        _programs[key] = jax.jit(
            lambda old, others: list(function(*old, *others)), donate_argnums=0
        )
    return _programs[key]


def _is_in(jaxpr: Jaxpr, place: int, atoms: set[Var]) -> bool:
    atom = jaxpr.outvars[place]
    return isinstance(atom, Var) and atom in atoms


def _leading_to(jaxpr: Jaxpr, atoms: Sequence[Any], ends_at: str = "") -> list[JaxprEqn]:
    """Returns the equations that compute variables, in their order, from results of a primitive."""
    wanted = {atom for atom in atoms if isinstance(atom, Var)}
    found: list[JaxprEqn] = []
    for eqn in reversed(jaxpr.eqns):
        if not wanted.isdisjoint(eqn.outvars) and eqn.primitive.name != ends_at:
            wanted.update(_read(eqn))
            found.append(eqn)
    return found[::-1]


def _needed(jaxpr: Jaxpr) -> Jaxpr:
    """Returns a jaxpr with the equations that its outputs need."""
    return jaxpr.replace(eqns=_leading_to(jaxpr, jaxpr.outvars))


def _inputs(eqns: Sequence[JaxprEqn]) -> list[Var]:
    """Returns the variables that equations take from elsewhere, in their order."""
    made = {atom for eqn in eqns for atom in eqn.outvars}
    read = dict.fromkeys(atom for eqn in eqns for atom in _read(eqn))
    return [atom for atom in read if atom not in made]


def _read(eqn: JaxprEqn) -> list[Var]:
    return [atom for atom in eqn.invars if not isinstance(atom, Literal)]
