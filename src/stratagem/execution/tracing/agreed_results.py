"""Checks of the values in a traced step that must be the same on every replica."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from stratagem.execution.analysis.replication import differing_outputs
from stratagem.execution.tracing.errors import disagreement
from stratagem.execution.tracing.trace import Trace

__all__ = ["use_agreement"]


def use_agreement(trace: Trace, unproven: Set[int], strategy: Any) -> None:
    """Checks assignments that replicas must agree on, and finds results that are cut for nobody.

    A result that is the same on every replica (summed, gathered) holds no rows of one replica, even
    if its leading size happens to be that of a padded part.

    Args:
        trace: of the step; the lengths of its results are changed.
        unproven: variables, by identity, whose new values must be the same on all replicas.
        strategy: that runs the step.

    Raises:
        ValueError: such a value may differ.
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
