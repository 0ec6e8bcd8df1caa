"""Program of a step that leaves work to other programs, and the programs that do this work."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from stratagem.devices.background import background_flights, start_beside
from stratagem.devices.lockstep import compiling, wait_for_background
from stratagem.devices.mesh import Topology
from stratagem.execution.programs.program import Program
from stratagem.execution.tracing.arguments import flatten_arguments
from stratagem.execution.tracing.functionalize import Trace
from stratagem.execution.tracing.garbage_collection import paused_garbage_collection
from stratagem.execution.tracing.lost_changes import agree_on_program, name_of
from stratagem.execution.tracing.tracer import trace_replica_function
from stratagem.variables.distributed import PerReplica

if TYPE_CHECKING:
    from stratagem.contexts import StrategyParts


class FollowedProgram(Program):
    """A step that leaves work to other programs. `make_whole` returns one that does it itself.

    Steps that loop on the devices are of the latter kind, because nothing follows each of them.
    """

    def __init__(
        self, trace: Trace, topology: Topology, name: str, make_whole: Callable[[], Program]
    ) -> None:
        super().__init__(trace, topology, name)
        self._whole = functools.cache(make_whole)

    def run_for(self, split: list[Any], shared: list[Any]) -> Any:
        """Runs one step on flat arguments, and what follows it."""
        for work in self.trace.follow_ups.work:
            work.before_step()
        with self._observed(1):
            results = self._assemble(self._run(split, shared))
            for work in self.trace.follow_ups.work:
                work.after_step()
        return results

    def run_many(self, split: list[Any], shared: list[Any]) -> Any:
        """Runs all steps in the split arrays in one call on the devices."""
        return self._whole().run_many(split, shared)


class FollowUpProgram(Program):
    """A replica function that follows a step, compiled for one signature of its arguments.

    It returns nothing and sets variables. It may run beside later programs: then variables have
    their new values at once, as arrays that a read waits for. It takes the memory of their old
    ones, but arguments and variables that it only reads stay occupied until it ends, so that no
    program in between may take them.
    """

    def __init__(self, strategy: StrategyParts, fn: Callable[..., Any], *args: Any) -> None:
        topology, name = strategy.topology, name_of(fn)
        arguments = _flattened(args, topology)
        with paused_garbage_collection():
            trace = trace_replica_function(strategy, fn, arguments)
        super().__init__(trace, topology, name)
        self._compiled: Any = None

    def run_after_step(self, *args: Any) -> None:
        """Runs it in the order of all programs."""
        arguments = _flattened(args, self._topology)
        self._call(self._step, arguments.split, arguments.shared)

    def start_beside(self, *args: Any) -> object:
        """Starts it beside later programs; returns its token for `wait_for_background`."""
        arguments = _flattened(args, self._topology)
        shared = [self._everywhere(value) for value in arguments.shared]
        written, read_only, constants = self._lasting_inputs()
        inputs = (written, read_only, arguments.split, shared, [*constants, self._before()], [])
        if self._compiled is None:
            self._compiled = self._compiled_for(inputs)

        def start() -> tuple[Any, Any]:
            values, _, token, _ = self._compiled(*inputs)
            return (values, token), token

        values, token = start_beside(self._name, start)
        self._written.replace(values)
        return token

    def _before(self) -> Any:
        """Returns the token of the program after which this one sends."""
        if background_flights:
            token = background_flights[-1].token
            if token.devices() == self._devices:
                return token
            wait_for_background()
        return self._topology.replicate(np.zeros((), bool))

    def _compiled_for(self, inputs: Sequence[Any]) -> Any:
        """Compiles it here: a thread of its own would not have JAX's settings of this one."""
        if not self._topology.spans_processes:
            return self._step.lower(*inputs).compile()
        agree_on_program(self._name, self.trace.jaxpr)
        with compiling(self._name):
            return self._step.lower(*inputs).compile()

    def _jit(self, function: Callable[..., Any], *, many: bool) -> Any:
        del many
        # The token of the program before is an argument that only orders them.
        return jax.jit(function, donate_argnums=0, keep_unused=True)

    def _token(self, arguments: Sequence[Any]) -> Any:
        del arguments
        return jnp.zeros((), bool)


def _flattened(args: Sequence[Any], topology: Topology) -> Any:
    """Flattens arguments, of which those in lists have a component per replica."""
    parts = [
        [PerReplica(stacked=one) for one in value] if isinstance(value, list) else value
        for value in args
    ]
    return flatten_arguments(parts, {}, num_replicas=topology.num_replicas)
