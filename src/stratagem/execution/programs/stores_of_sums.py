"""Stores whose shards of a sum over replicas an update needs."""

from __future__ import annotations

from typing import Any

from jax.extend.core import Jaxpr, Literal

from stratagem.execution.programs.update_part import StepParts
from stratagem.execution.tracing.trace import Trace
from stratagem.variables.sharded_store import ShardedStore
from stratagem.variables.store import store_of


def store_for(variable: Any, store: ShardedStore) -> ShardedStore:
    """Returns the store of a variable or, if it is replicated, of its slots."""
    own = store_of(variable)
    if isinstance(own, ShardedStore):
        return own
    return store.divided(getattr(variable, "division", None))


def stores_of_sums(
    trace: Trace, parts: StepParts, store: ShardedStore
) -> list[ShardedStore | None]:
    """Returns the store of the variable that the update computes from each value of the replicas.

    None stands for a value that is not of the shape of such a variable. A gradient belongs to
    the variable and the slots of its shape that operations of the update combine it with, directly
    or not. If there are several, or none, it is the first of this shape: the result decides where
    sums are computed, never their value.
    """
    pairs = zip(trace.written, parts.is_updated, strict=False)
    updated = [variable for variable, is_updated in pairs if is_updated]
    is_stored = [store_of(variable) is not None for variable in updated]
    by_shape: dict[Any, ShardedStore] = {}
    by_set: dict[int, ShardedStore] = {}
    sets = _sets_of_equal_shape(parts.update)
    for variable, atom, stored in zip(updated, parts.update.outvars, is_stored, strict=True):
        if stored:
            by_shape.setdefault(tuple(variable.shape), store_for(variable, store))
            by_set.setdefault(sets.of(atom), store_for(variable, store))
    found: dict[int, ShardedStore | None] = {}
    for (pool, place), atom in zip(parts.update_inputs, parts.update.invars, strict=True):
        if pool == "handed":
            shape = tuple(getattr(atom.aval, "shape", ()))
            found[place] = by_set.get(sets.of(atom), by_shape.get(shape))
    return [found.get(place) for place in range(parts.num_handed)]


class _Sets:
    """Disjoint sets of values."""

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


def _sets_of_equal_shape(jaxpr: Jaxpr) -> _Sets:
    """Returns sets of values of the same shape that operations connect."""
    sets = _Sets()
    for eqn in jaxpr.eqns:
        first: dict[Any, Any] = {}
        atoms: list[Any] = [*eqn.invars, *eqn.outvars]
        for atom in atoms:
            shape = getattr(atom.aval, "shape", ())
            if shape and not isinstance(atom, Literal):
                sets.join(atom, first.setdefault(shape, atom))
    return sets
