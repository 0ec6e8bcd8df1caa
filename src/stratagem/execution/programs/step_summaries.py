"""Summaries of a step: each call decides whether to record them."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from stratagem.devices.mesh import Topology
from stratagem.execution.summary.collector import current_collector, is_tracing
from stratagem.execution.summary.host_callbacks import forward_summaries
from stratagem.execution.summary.recording import Recording, begin_recording
from stratagem.execution.tracing.trace import Trace
from stratagem.variables.distributed import PerReplica


class StepSummaries:
    """Decides per call whether a step records its summaries, and writes their values.

    A skipped branch still takes time, so a step with expensive summaries has a second program
    without them.
    """

    def __init__(self, trace: Trace, topology: Topology) -> None:
        assert trace.summaries is not None
        self._trace, self._summaries = trace, trace.summaries
        self._topology = topology
        self._recording: Recording | None = None
        with jax.ensure_compile_time_eval():  # it outlives a jax.jit around the first call
            self._true = topology.replicate(np.True_)

    def decide(self) -> bool:
        """Decides whether the next call records; returns True to run the program without summaries.

        Raises ValueError if a summary is to be written but the step number is unknown.
        """
        if is_tracing():
            return False
        self._recording = begin_recording(self._summaries.every)
        # Processes may decide differently, but must run the same program.
        is_plain = self._summaries.are_expensive and not self._topology.spans_processes
        return self._recording is None and is_plain

    def begin(self, constants: list[Any]) -> list[Any]:
        """Returns the program's constants, with the one that turns recording on set if needed."""
        records: Any = self._true
        if is_tracing():  # the enclosing function decides
            collector = current_collector()
            if collector is not None and isinstance(collector.records, Tracer):
                records = collector.records
        elif self._recording is None:
            return constants
        place = self._trace.records
        assert place is not None
        return [*constants[:place], records, *constants[place + 1 :]]

    def end(self, results: list[Any], num_steps: int | None) -> list[Any]:
        """Writes the recorded summaries and returns the other results.

        `num_steps` is the number of steps in the call; None for a single step.
        """
        trace = self._trace
        first, end = trace.num_results, trace.num_outputs
        others = results[:first] + results[end:]
        outputs: list[Any] = results[first:end]
        if (outputs and isinstance(outputs[0], Tracer)) or is_tracing():
            forward_summaries(self._summaries.summaries, self._of_first(outputs))
        elif self._recording is not None:
            if self._topology.num_replicas > 1:
                outputs = [PerReplica(stacked=output) for output in outputs]
            values = jax.tree.unflatten(self._summaries.structure, outputs)
            self._recording.keep(self._summaries.summaries, values, num_steps)
        return others

    def _of_first(self, outputs: list[Any]) -> list[Any]:
        """Returns the values of replica 0."""
        if self._topology.num_replicas > 1:
            outputs = [output[0] for output in outputs]
        return jax.tree.unflatten(self._summaries.structure, outputs)
