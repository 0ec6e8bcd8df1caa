"""Trace: the result of tracing a replica function."""

from __future__ import annotations

import dataclasses
from typing import Any

from jax.extend.core import ClosedJaxpr

from stratagem.execution.tracing.remote_state import Lookup
from stratagem.summary.collector import CollectedSummaries
from stratagem.variables import VariableKind, home_of

__all__ = ["Trace"]


@dataclasses.dataclass
class Trace:
    """The traced step of one replica.

    Args:
        jaxpr: the program of one replica. Its inputs are the values of `read_only` and `written`
            variables, the split and the shared arguments and `constants`, by the indices below;
            its outputs are the new values of `written`, then the array results, the last of which
            are the values of `summaries`.
        read_only: variables that are read and not written.
        written: variables that are written.
        inputs: for each input of the jaxpr where it comes from: ("read_only", i), ("written", i),
            ("split", i), ("shared", i) or ("constant", i).
        constants: arrays that the function closed over.
        result_structure: pytree structure of the result.
        results: for each leaf of the result the index of its output, or the Python object itself.
        late: results, by their output, that are values of variables after the step.
        result_lengths: true leading sizes of each array result that is padded; else None.
        lookups: of rows that come from outside, as inputs ("rows", i).
        sent: what the outputs after the results are, which leave the process.
        added_to: the variables that were only added to, by identity.
        summaries: that the function writes; None for none.
        records: which of the constants tells whether any is recorded; None where nothing asks.
    """

    jaxpr: ClosedJaxpr
    read_only: list[Any]
    written: list[Any]
    inputs: list[tuple[str, int]]
    constants: list[Any]
    result_structure: Any
    results: list[tuple[bool, Any]]
    result_lengths: list[tuple[int, ...] | None]
    late: list[tuple[int, Any]] = dataclasses.field(default_factory=list[tuple[int, Any]])
    lookups: list[Lookup] = dataclasses.field(default_factory=list[Lookup])
    sent: list[Any] = dataclasses.field(default_factory=list[Any])
    added_to: frozenset[int] = frozenset()
    summaries: CollectedSummaries | None = None
    records: int | None = None

    @property
    def differing_inputs(self) -> list[bool]:
        """Returns, for each input of the jaxpr, True if it may differ between replicas."""
        flags: list[bool] = []
        for source, index in self.inputs:
            if source in ("written", "read_only"):
                variables = self.written if source == "written" else self.read_only
                home = home_of(variables[index])
                flags.append(home is not None and home.kind is VariableKind.ON_READ)
            else:
                flags.append(source in ("split", "rows"))
        return flags

    def without_summaries(self) -> Trace:
        """Returns the trace of a step that writes none."""
        first = len(self.written)
        outputs = self.jaxpr.jaxpr.outvars
        kept = [*outputs[: first + self.num_results], *outputs[first + self.num_outputs :]]
        jaxpr = ClosedJaxpr(self.jaxpr.jaxpr.replace(outvars=kept), self.jaxpr.consts)
        return dataclasses.replace(self, jaxpr=jaxpr, summaries=None, records=None)

    @property
    def num_results(self) -> int:
        """Number of arrays that the function returns."""
        return sum(is_output for is_output, _ in self.results)

    @property
    def num_outputs(self) -> int:
        """Number of arrays of the function's result, and of its summaries."""
        summaries = self.summaries
        return self.num_results + (0 if summaries is None else summaries.structure.num_leaves)
