"""Variables that a value for the update is combined with, element by element."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.core import Jaxpr, Literal

from stratagem.execution.programs.update_part import StepParts
from stratagem.execution.tracing.trace import Trace

__all__ = ["updated_variables"]


def updated_variables(trace: Trace, parts: StepParts) -> dict[int, list[Any]]:
    """Returns the variables that the update combines with each value from the replicas, by number.

    A gradient is thus found to belong to a variable and its slots. Values of several variables are
    told apart only if no operation of the update takes both with the same shape. The result
    decides how sums are sharded, never their value.
    """
    classes = _classes_of_equal_shape(parts.update)
    variables: dict[int, list[Any]] = {}
    for (pool, place), atom in zip(parts.update_inputs, parts.update.invars, strict=True):
        source, index = trace.inputs[place] if pool == "input" else (pool, place)
        if source == "written":
            variables.setdefault(classes.of(atom), []).append(trace.written[index])
    for atom, variable in zip(parts.update.outvars, _updated(trace.written, parts), strict=True):
        variables.setdefault(classes.of(atom), []).append(variable)
    return {
        place: variables.get(classes.of(atom), [])
        for (pool, place), atom in zip(parts.update_inputs, parts.update.invars, strict=True)
        if pool == "handed"
    }


def _updated(written: Sequence[Any], parts: StepParts) -> list[Any]:
    pairs = zip(written, parts.is_updated, strict=False)
    return [variable for variable, is_updated in pairs if is_updated]


class _Classes:
    """Sets of values, joined two at a time."""

    def __init__(self) -> None:
        self._parents: dict[int, int] = {}

    def of(self, atom: object) -> int:
        """Returns the representative of a value's set."""
        key = id(atom)
        while (parent := self._parents.get(key, key)) != key:
            self._parents[key] = self._parents.get(parent, parent)
            key = parent
        return key

    def join(self, one: object, other: object) -> None:
        """Joins the sets of two values."""
        self._parents[self.of(one)] = self.of(other)


def _classes_of_equal_shape(jaxpr: Jaxpr) -> _Classes:
    """Returns sets of values of the same shape that operations connect."""
    classes = _Classes()
    for eqn in jaxpr.eqns:
        atoms: list[Any] = [*eqn.invars, *eqn.outvars]
        by_shape: dict[Any, Any] = {}
        for atom in atoms:
            shape = getattr(atom.aval, "shape", ())
            if not shape or isinstance(atom, Literal):
                continue
            classes.join(atom, by_shape.setdefault(shape, atom))
    return classes
