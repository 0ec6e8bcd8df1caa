"""`Trace`: the result of tracing a replica function."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from jax.extend.core import ClosedJaxpr

from stratagem.execution.summary.collector import CollectedSummaries
from stratagem.execution.tracing.follow_ups import FollowUps
from stratagem.execution.tracing.remote_state import Ids, Lookup, WholeInput, without_unused
from stratagem.variables.kind import VariableKind
from stratagem.variables.registry import home_of


@dataclasses.dataclass
class Trace:
    """The traced step of one replica.

    Outputs of `jaxpr` are the new values of `written`, then the array results, the values of
    `summaries`, and the values of `sent`.
    """

    jaxpr: ClosedJaxpr
    read_only: list[Any]  # variables
    written: list[Any]  # variables
    # ("read_only", i), ("written", i), ("split", i), ("shared", i), ("constant", i), ("rows", i)
    inputs: list[tuple[str, int]]
    constants: list[Any]  # arrays that the function closed over
    result_structure: Any
    results: list[tuple[bool, Any]]  # (True, output index) or (False, object) for each leaf
    result_lengths: list[tuple[int, ...] | None]  # true leading sizes of padded results
    # Pairs of an output and the variable whose value after the step replaces it.
    late: list[tuple[int, Any]] = dataclasses.field(default_factory=list[tuple[int, Any]])
    # Row lookups whose rows come from outside, as inputs ("rows", i).
    lookups: list[Lookup] = dataclasses.field(default_factory=list[Lookup])
    # Meaning of each trailing output, which leaves the process.
    sent: list[Any] = dataclasses.field(default_factory=list[Any])
    added_to: frozenset[int] = frozenset()  # ids of variables that were only added to
    summaries: CollectedSummaries | None = None
    records: int | None = None  # index of the constant that turns recording of summaries on
    follow_ups: FollowUps = dataclasses.field(default_factory=FollowUps)
    splits_sequences: bool = False  # True if a replica's devices share sequences

    @property
    def differing_inputs(self) -> list[bool]:
        """Returns, for each input of the jaxpr, True if it may differ between replicas."""
        flags: list[bool] = []
        owners = [lookup for lookup in self.lookups for _ in lookup.inputs]
        for source, index in self.inputs:
            if source in ("written", "read_only"):
                variables = self.written if source == "written" else self.read_only
                home = home_of(variables[index])
                flags.append(home is not None and home.kind is VariableKind.ON_READ)
            else:
                is_of_all = source == "rows" and isinstance(owners[index], WholeInput)
                flags.append(source in ("split", "rows") and not is_of_all)
        return flags

    @functools.cached_property
    def stages(self) -> list[int]:
        """Numbers of sent values that must be used before the step goes on with the results.

        The step reads variables again that servers update from these values.
        """
        jaxpr = self.jaxpr.jaxpr
        if not any(lookup.after for lookup in self.lookups):
            return []
        _, stays = without_unused(jaxpr, [False] * len(jaxpr.invars))
        pairs = zip(self.inputs, stays, strict=True)
        used = {index for (source, index), stay in pairs if source == "rows" and stay}
        owners = [lookup for lookup in self.lookups for _ in lookup.inputs]
        return sorted({owners[index].after for index in used} - {0})

    def after_sending(self, count: int) -> Trace:
        """Returns the trace of a step that has sent its first `count` values, apart from ids."""
        first = len(self.written) + self.num_outputs
        kept = [
            place for place, what in enumerate(self.sent) if place >= count or isinstance(what, Ids)
        ]
        outputs = self.jaxpr.jaxpr.outvars
        rest = outputs[first + len(self.sent) :]
        outvars = [*outputs[:first], *(outputs[first + place] for place in kept), *rest]
        jaxpr = ClosedJaxpr(self.jaxpr.jaxpr.replace(outvars=outvars), self.jaxpr.consts)
        return dataclasses.replace(self, jaxpr=jaxpr, sent=[self.sent[place] for place in kept])

    @property
    def trains(self) -> bool:
        """True if the step, or what follows it, sets weights that are trained."""
        is_own = any(getattr(variable, "trainable", False) for variable in self.written)
        return is_own or bool(self.follow_ups.work)

    def without_summaries(self) -> Trace:
        """Returns the trace of the same step without summaries."""
        first = len(self.written)
        outputs = self.jaxpr.jaxpr.outvars
        remaining = [*outputs[: first + self.num_results], *outputs[first + self.num_outputs :]]
        jaxpr = ClosedJaxpr(self.jaxpr.jaxpr.replace(outvars=remaining), self.jaxpr.consts)
        return dataclasses.replace(self, jaxpr=jaxpr, summaries=None, records=None)

    @property
    def num_results(self) -> int:
        """Number of arrays that the function returns."""
        return sum(is_output for is_output, _ in self.results)

    @property
    def num_outputs(self) -> int:
        """Number of arrays in the function's result and its summaries."""
        summaries = self.summaries
        return self.num_results + (0 if summaries is None else summaries.structure.num_leaves)
