"""Remote state: the interface through which steps use variables outside their process.

A step fetches the values it reads before its program starts, and commits changes after it ends.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from stratagem.devices.mesh import Topology
from stratagem.execution.jaxprs import without_unused
from stratagem.variables.layouts import is_keyed

if TYPE_CHECKING:
    import keras

    from stratagem.contexts import StrategyParts
    from stratagem.execution.tracing.functionalize import Trace


@dataclasses.dataclass(frozen=True, eq=False)
class Lookup:
    """One row lookup in a remote or offloaded table; `shape`, (*ids.shape, ...), is per replica.

    Ids of a keyed table are 64-bit keys, as pairs of uint32 on a last axis of their own. With the
    rows, the program receives the place of each key among the distinct keys of the step. Gradients
    have these places as indices.

    The rows are those after the servers have used the first `after` values that the step sends.
    """

    table: Any
    shape: tuple[int, ...]
    dtype: Any
    after: int = 0

    def is_like(self, other: Lookup) -> bool:
        """Returns True if another lookup is in the same table and of the same shape."""
        is_same = type(self) is type(other) and self.after == other.after
        return is_same and self.table is other.table and self.shape == other.shape

    @property
    def is_keyed(self) -> bool:
        """True if the ids are keys."""
        return is_keyed(self.table)

    @property
    def inputs(self) -> list[jax.ShapeDtypeStruct]:
        """Inputs of the program: the rows, and for a keyed table the place of each."""
        rows = jax.ShapeDtypeStruct(self.shape, self.dtype)
        if not self.is_keyed:
            return [rows]
        shape = self.shape[: 1 - len(self.table.shape)]
        return [rows, jax.ShapeDtypeStruct(shape, np.dtype("int32"))]

    def received(self, inputs: Sequence[Any]) -> Any:
        """Returns what a function gets, from its first of some inputs: rows, or also places."""
        return tuple(inputs[:2]) if self.is_keyed else inputs[0]

    def zeros(self, num_replicas: int) -> list[np.ndarray]:
        """Returns inputs of an unused lookup, for all replicas."""
        several = (num_replicas,) if num_replicas > 1 else ()
        return [np.zeros((*several, *one.shape), one.dtype) for one in self.inputs]


class WholeInput(Lookup):
    """A value that a step gets without ids, the same on all replicas."""

    @property
    def is_keyed(self) -> bool:
        """Always False: the value is whole."""
        return False


class UpdatedValue(WholeInput):
    """Value of a variable, `table`, that the servers change within the step."""


class SumOverWorkers(WholeInput):
    """Sum of a `Summand` over the workers that share a batch; it has no table."""


class BatchShare(WholeInput):
    """This worker's fraction of a batch that workers share, for its gradients; without a table."""


def inputs_of(lookups: Sequence[Lookup]) -> list[jax.ShapeDtypeStruct]:
    """Returns the inputs of several lookups, in order."""
    return [one for lookup in lookups for one in lookup.inputs]


@dataclasses.dataclass(frozen=True)
class Ids:
    """Marks a program output that holds the ids of a lookup; `lookup` is its index in the trace."""

    lookup: int


@dataclasses.dataclass(frozen=True)
class Summand:
    """Marks an output that is added up over workers; `lookup` is the index of the sum's lookup."""

    lookup: int


class RemoteState(Protocol):
    """Access to variables stored outside this process, such as on parameter servers."""

    shares_batches: bool  # True if this process computes a part of each batch, and others the rest

    def holds(self, trace: Trace) -> bool:
        """True if a step reads or changes any of these variables."""
        ...

    def updates_after_step(self, variable: keras.Variable, sent: Sequence[Any]) -> bool:
        """True if servers update the variable after the step, from the gradients it sends."""
        ...

    def run(
        self,
        trace: Trace,
        ids_of: Callable[[], list[Any]],
        call: Callable[[list[Any]], list[Any]],
        early: Callable[[int, int, list[Any]], list[Any]],
    ) -> None:
        """Runs one step: fetches its variables, calls its program, and commits the changes.

        `early` computes `trace.sent[first:last]`, given `first`, `last` and the inputs known so
        far, for the stages of the trace. `call` then returns the rest of what is sent.

        `ids_of` returns the ids of each lookup; call it after the variables have their values.
        `call` runs the program with the `inputs` of all lookups, stores its writes in the local
        variables, and returns the values to send, in the order of `trace.sent`.
        """
        ...

    def send(self, sent: Sequence[tuple[Any, Any]]) -> None:
        """Commits a step that ran op by op: pairs of an entry of `trace.sent` and its value."""
        ...


def gets_rows(strategy: StrategyParts) -> bool:
    """True if a step may look up rows that come from outside its program."""
    return strategy.placement.uses_stores or strategy.placement.remote is not None


def chained_tables(trace: Trace) -> frozenset[int]:
    """Returns the ids of tables whose lookup ids depend on other looked-up rows of the step.

    Keyed tables are left out: nothing has all of their rows.
    """
    jaxpr, tables = trace.jaxpr.jaxpr, set[int]()
    first = len(trace.written) + trace.num_outputs
    for place, what in enumerate(trace.sent):
        if not isinstance(what, Ids) or trace.lookups[what.lookup].is_keyed:
            continue
        ids = jaxpr.replace(outvars=[jaxpr.outvars[first + place]])
        _, stays = without_unused(ids, [False] * len(jaxpr.invars), keeps_effects=False)
        sources = zip(trace.inputs, stays, strict=True)
        if any(stay and source == "rows" for (source, _), stay in sources):
            tables.add(id(trace.lookups[what.lookup].table))
    return frozenset(tables)


# Extraction of the program of one replica from the trace of all replicas.

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
