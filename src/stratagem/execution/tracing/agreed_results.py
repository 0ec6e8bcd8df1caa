"""Agreement of replicas: checks assigned values and results that must be equal on all replicas."""

from __future__ import annotations

from collections.abc import Set

from stratagem.execution.analysis.replication import differing_outputs
from stratagem.execution.tracing.errors import disagreement
from stratagem.execution.tracing.trace import Trace


def use_agreement(trace: Trace, unproven: Set[int], strategy: object) -> None:
    """Checks that `unproven` variables, by id, are assigned equal values on all replicas.

    Also clears row lengths of results that are equal on all replicas (summed, gathered): they are
    not one replica's rows, even if their leading size happens to match a padded part.
    """
    has_cut = any(lengths is not None for lengths in trace.result_lengths)
    if not (unproven or has_cut):
        return
    flags = differing_outputs(trace.jaxpr.jaxpr, trace.differing_inputs)
    for variable, differs in zip(trace.written, flags, strict=False):
        if differs and id(variable) in unproven:
            raise disagreement(variable, strategy)
    result_flags = flags[len(trace.written) :]
    for position, (is_output, output) in enumerate(trace.results):
        if is_output and not result_flags[output]:
            trace.result_lengths[position] = None
