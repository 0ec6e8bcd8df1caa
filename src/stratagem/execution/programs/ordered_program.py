"""Program of a step whose sums over replicas go through shared memory, in one order."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from stratagem.contexts import current_function_trace
from stratagem.devices.collectives.shared_sums import no_sums
from stratagem.devices.mesh import Topology
from stratagem.execution.programs.convolutions import fast_on_cpu
from stratagem.execution.programs.program import Program
from stratagem.execution.summary.collector import is_tracing
from stratagem.execution.tracing.trace import Trace


class OrderedProgram(Program):
    """A program in which each sum waits for the one before, also from step to step.

    `ordered` is of `collectives.shared_sums.in_order`. Within a program of the user's, two steps
    could run at once and without an order, so that the trace is used as it is.
    """

    def __init__(self, trace: Trace, topology: Topology, name: str, ordered: ClosedJaxpr) -> None:
        self._ordered = ordered
        self._inner = functools.cache(lambda: Program(trace, topology, name))
        super().__init__(trace, topology, name)

    def run_for(self, split: list[Any], shared: list[Any]) -> Any:
        """Runs one step on flat arguments."""
        run = self._inner().run_for if _is_inside() else super().run_for
        return run(split, shared)

    def run_many(self, split: list[Any], shared: list[Any]) -> Any:
        """Runs all steps in the split arrays in one call on the devices."""
        run = self._inner().run_many if _is_inside() else super().run_many
        return run(split, shared)

    def _function(self, *, many: bool) -> Callable[..., Any]:
        function = super()._function(many=many)

        def run(written: list[Any], *others: list[Any]) -> Any:
            values, *outputs = function([*written, no_sums()], *others)
            return values[:-1], *outputs

        return run

    def _evaluate(self, inputs: list[Any], written: list[Any]) -> list[Any]:
        count = len(written) - 1
        ordered = fast_on_cpu(self._ordered, self._topology)
        *outputs, order = jaxpr_as_fun(ordered)(*inputs, written[count])
        return [*outputs[:count], order, *outputs[count:]]


def _is_inside() -> bool:
    return current_function_trace() is not None or is_tracing()
