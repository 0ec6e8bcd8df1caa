"""The summaries of a step: whether they are recorded is decided when it is called."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from stratagem.execution.tracing.trace import Trace
from stratagem.summary.collector import current_collector, is_tracing
from stratagem.summary.host_callbacks import forward_summaries
from stratagem.summary.recording import Recording, begin_recording
from stratagem.topology import Topology
from stratagem.values import PerReplica

__all__ = ["StepSummaries"]


class StepSummaries:
    """Selects programs with or without summaries, and writes the values of summaries.

    A branch that is not taken still takes time to get past: a step with such branches has a second
    program without summaries, for calls that record none.

    Args:
        trace: of the step.
        topology: the devices of the replicas.
    """

    def __init__(self, trace: Trace, topology: Topology) -> None:
        assert trace.summaries is not None
        self._trace, self._summaries = trace, trace.summaries
        self._topology = topology
        self._recording: Recording | None = None
        with jax.ensure_compile_time_eval():  # it outlives a jax.jit around the first call
            self._true = topology.replicate(np.True_)

    def decide(self) -> bool:
        """Decides what the next call records; tells whether it may do without all summaries.

        Raises:
            ValueError: a summary is to be written, and no step is known.
        """
        if is_tracing():
            return False
        self._recording = begin_recording(self._summaries.every)
        # Processes that do not decide alike still have one program.
        is_plain = self._summaries.are_expensive and not self._topology.spans_processes
        return self._recording is None and is_plain

    def begin(self, constants: list[Any]) -> list[Any]:
        """Returns the constants that tell the program what was decided.

        Args:
            constants: of the program, as of a step that records nothing.
        """
        records: Any = self._true
        if is_tracing():  # what is around this step decides
            collector = current_collector()
            if collector is not None and isinstance(collector.records, Tracer):
                records = collector.records
        elif self._recording is None:
            return constants
        place = self._trace.records
        assert place is not None
        return [*constants[:place], records, *constants[place + 1 :]]

    def end(self, results: list[Any], num_steps: int | None) -> list[Any]:
        """Has the summaries written; returns the other results.

        Args:
            results: of the program.
            num_steps: how many steps the call had; None for one.
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
        """The values of replica 0."""
        if self._topology.num_replicas > 1:
            outputs = [output[0] for output in outputs]
        return jax.tree.unflatten(self._summaries.structure, outputs)
