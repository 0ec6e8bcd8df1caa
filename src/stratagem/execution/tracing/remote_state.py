"""Remote state: the interface through which steps use variables outside their process.

A step fetches what it reads before its program starts, and commits changes after it ends.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from jax.extend.core import Jaxpr, Literal

from stratagem.context.function_trace import current_function_trace

if TYPE_CHECKING:
    from stratagem.execution.tracing.trace import Trace

__all__ = ["Ids", "Lookup", "RemoteState", "chained_tables", "gets_rows", "without_unused"]


@dataclasses.dataclass(frozen=True, eq=False)
class Lookup:
    """One lookup of rows in a table that is not in this process.

    Args:
        table: the variable.
        shape: of the rows, (*ids.shape, ...), of one replica.
        dtype: of the rows.
    """

    table: Any
    shape: tuple[int, ...]
    dtype: Any

    def is_like(self, other: Lookup) -> bool:
        """Returns True if another lookup is in the same table and of the same shape."""
        return self.table is other.table and self.shape == other.shape  # variables compare elements


@dataclasses.dataclass(frozen=True)
class Ids:
    """Output of a program for a lookup: the ids.

    Args:
        lookup: which of the trace's lookups.
    """

    lookup: int


class RemoteState(Protocol):
    """Access to variables stored outside this process, such as on parameter servers."""

    def holds(self, trace: Trace) -> bool:
        """True if a step reads or changes any of these variables."""
        ...

    def updates_after_step(self, variable: Any, sent: Sequence[Any]) -> bool:
        """True if servers update the variable after the step, from the gradients it sends."""
        ...

    def run(
        self,
        trace: Trace,
        ids_of: Callable[[], list[Any]],
        call: Callable[[list[Any]], list[Any]],
    ) -> None:
        """Runs one step: fetches its variables, calls its program, and commits the changes.

        Args:
            trace: the traced step.
            ids_of: returns the ids of each lookup. Call it when the variables have their values.
            call: runs the program with the rows of each lookup, stores what it wrote in the local
                variables, and returns the values to send, in the order of `trace.sent`.
        """
        ...

    def send(self, sent: Sequence[tuple[Any, Any]]) -> None:
        """Commits a step that ran op by op.

        Args:
            sent: pairs of an entry of `trace.sent` and its value, the same on all replicas.
        """
        ...


def gets_rows(strategy: Any) -> bool:
    """True if rows that a step looks up may come from outside its program."""
    # An sg.function around the step is one program, which has whole values.
    is_stored = strategy.placement.uses_stores and current_function_trace() is None
    return is_stored or strategy.placement.remote is not None


def _counts(effect: Any) -> bool:
    """Returns True for effects that keep an operation; naming a mesh axis is none."""
    return type(effect).__name__ != "NamedAxisEffect"


def without_unused(
    jaxpr: Jaxpr, is_kept: Sequence[bool], *, keeps_effects: bool = True
) -> tuple[Jaxpr, list[bool]]:
    """Leaves out what no result of a jaxpr depends on.

    Args:
        jaxpr: the jaxpr.
        is_kept: of each input whether it stays even if nothing depends on it.
        keeps_effects: whether what it does besides, such as to print, stays.

    Returns:
        The jaxpr, and of each input whether it is there still.
    """
    needed = {id(atom) for atom in jaxpr.outvars if not isinstance(atom, Literal)}
    eqns: list[Any] = []
    for eqn in reversed(jaxpr.eqns):
        has_effect = keeps_effects and any(map(_counts, eqn.effects))
        if has_effect or any(id(variable) in needed for variable in eqn.outvars):
            eqns.append(eqn)
            needed.update(id(atom) for atom in eqn.invars if not isinstance(atom, Literal))
    stays = [
        keep or id(variable) in needed for variable, keep in zip(jaxpr.invars, is_kept, strict=True)
    ]
    invars = [variable for variable, stay in zip(jaxpr.invars, stays, strict=True) if stay]
    return jaxpr.replace(eqns=eqns[::-1], invars=invars), stays


def chained_tables(trace: Any) -> frozenset[int]:
    """Returns the tables whose rows are asked for by other rows that the step looks up.

    Args:
        trace: of the step.

    Returns:
        The identities of the variables.
    """
    jaxpr, tables = trace.jaxpr.jaxpr, set[int]()
    first = len(trace.written) + trace.num_outputs
    for place, what in enumerate(trace.sent):
        if not isinstance(what, Ids):
            continue
        ids = jaxpr.replace(outvars=[jaxpr.outvars[first + place]])
        _, stays = without_unused(ids, [False] * len(jaxpr.invars), keeps_effects=False)
        sources = zip(trace.inputs, stays, strict=True)
        if any(stay and source == "rows" for (source, _), stay in sources):
            tables.add(id(trace.lookups[what.lookup].table))
    return frozenset(tables)
