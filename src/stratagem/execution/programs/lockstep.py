"""Lockstep execution: one compiled SPMD program for all replicas, cached by function and shapes."""

from __future__ import annotations

import contextlib
import functools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from stratagem import config
from stratagem.contexts import current_function_trace
from stratagem.devices.collectives.shared_sums import in_order, is_connected
from stratagem.devices.lockstep import compiling
from stratagem.devices.mesh import Topology
from stratagem.execution.eager.replicas import run_eagerly
from stratagem.execution.programs.argument_differences import ArgumentKinds
from stratagem.execution.programs.compilations import note_compilation
from stratagem.execution.programs.followed_program import FollowedProgram
from stratagem.execution.programs.multistep import run_steps
from stratagem.execution.programs.offloaded_program import OffloadedProgram, is_offloaded
from stratagem.execution.programs.ordered_program import OrderedProgram
from stratagem.execution.programs.program import Program
from stratagem.execution.programs.recompilations import Recompilations
from stratagem.execution.programs.sharded_program import ShardedProgram, is_sharded
from stratagem.execution.programs.step_capture import offer_step
from stratagem.execution.summary.settings import trace_key
from stratagem.execution.tracing.arguments import Arguments, flatten_arguments
from stratagem.execution.tracing.follow_ups import taking_follow_ups
from stratagem.execution.tracing.function_identity import FunctionKeys
from stratagem.execution.tracing.garbage_collection import paused_garbage_collection
from stratagem.execution.tracing.program_fingerprint import name_of
from stratagem.execution.tracing.remote_state import RemoteState
from stratagem.execution.tracing.trace import Trace
from stratagem.execution.tracing.tracer import trace_replica_function
from stratagem.input.batches import HostBatch
from stratagem.input.iterator import DistributedIterator
from stratagem.options import ReduceOp
from stratagem.variables.initial_values import agree_on_initial_values
from stratagem.variables.layouts import require_layouts_used

if TYPE_CHECKING:
    from stratagem.contexts import StrategyParts


class Lockstep:
    """Runs replica functions on all replicas at once, and caches their programs. See `Executor`.

    `steps_per_call` is the default number of steps of `run_steps` and `fit`; None for no default.
    """

    schedules = False
    has_values = True
    worker: tuple[int, int] = (0, 1)

    def __init__(self, strategy: StrategyParts, *, steps_per_call: int | None = None) -> None:
        self._strategy = strategy
        self.steps_per_call = steps_per_call
        self._programs: OrderedDict[Any, Program] = OrderedDict()
        self._keys = FunctionKeys()
        self._recompilations = Recompilations()
        self.carries: dict[Any, Any] = {}  # slots of `run_steps`, by structure, shapes and dtypes

    @property
    def programs(self) -> list[Program]:
        """The cached programs, most recently used last."""
        return list(self._programs.values())

    def check_scope(self) -> None:
        """Accepts every scope."""

    def settle(self) -> None:
        """Does nothing: all work is done when a call returns."""

    def close(self) -> None:
        """Does nothing: nothing was started."""

    def run(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Calls a function once per replica; see `Executor.run`."""
        if config.runs_eagerly():
            return run_eagerly(self._strategy, fn, args, kwargs)
        if (function_trace := current_function_trace()) is not None:
            function_trace.note_strategy(self._strategy)
        arguments = flatten_arguments(
            args, kwargs, num_replicas=self._strategy.num_replicas_in_sync
        )
        return self.program(fn, arguments).run(arguments)

    def run_steps(
        self,
        fn: Callable[..., Any],
        iterator: DistributedIterator,
        num_steps: int,
        *,
        reduce_op: ReduceOp | None,
        carry: object,
    ) -> Any:
        """Calls a function on the next batches; see `Executor.run_steps`."""
        return run_steps(
            self._strategy,
            fn,
            iterator,
            num_steps,
            reduce_op=reduce_op,
            carry=carry,
            eagerly=config.runs_eagerly(),
        )

    def run_batches(
        self, fn: Callable[..., Any], batches: list[HostBatch], arguments: Arguments | None
    ) -> Any:
        """Calls a function on batches of one signature, which `arguments` have on the devices."""
        assert arguments is not None
        program = self.program(fn, arguments)
        if len(batches) == 1:
            return program.run(arguments)
        return program.run_many(arguments.split, arguments.shared)

    def program(self, fn: Callable[..., Any], arguments: Arguments) -> Program:
        """Returns the program for a function and its arguments; traces the function if needed."""
        offer_step(self._strategy, fn, arguments, self._trace)
        is_inside = current_function_trace() is not None
        key = (self._keys.key(fn), arguments.structure, arguments.leaves, is_inside)
        program = self._programs.get(key)
        if program is not None and program.trace.summaries is not None:
            program = self._programs.get((key, trace_key()))
        if program is not None:
            self._programs.move_to_end(key)
            program.usage.is_reused = True
            return program
        topology = self._strategy.topology
        is_shared = topology.spans_processes
        with (
            compiling(name_of(fn)) if is_shared else contextlib.nullcontext(),
            paused_garbage_collection(),
        ):
            trace = self._traced(fn, arguments)
        if current_function_trace() is None:  # an sg.function does this itself
            agree_on_initial_values(self._strategy.variables, topology)
        if trace.written:
            self._strategy.placement.check()
        require_layouts_used(self._strategy.placement.layouts, trace.written)
        program = self._programs[key] = self._made_of(trace, fn, arguments)
        if not is_inside:  # otherwise the outer function was recompiled
            self._note_compilation(fn, arguments, program)
        if trace.summaries is not None:
            self._programs[(key, trace_key())] = program
        while len(self._programs) > config.program_cache_size():
            self._programs.popitem(last=False)
        return program

    def _note_compilation(
        self, fn: Callable[..., Any], arguments: Arguments, program: Program
    ) -> None:
        """Notes why a function is compiled, and warns if that happens again and again."""
        kinds = ArgumentKinds(arguments.structure, arguments.leaves)
        reason = self._recompilations.note(fn, kinds, program.usage)
        note_compilation([self._strategy], fn, reason)

    def _traced(self, fn: Callable[..., Any], arguments: Arguments) -> Trace:
        """Traces a step, which leaves work to programs of their own if it does not need it."""
        may_leave = current_function_trace() is None
        with taking_follow_ups() if may_leave else contextlib.nullcontext():
            trace = trace_replica_function(self._strategy, fn, arguments)
        work = trace.follow_ups
        if work.are_needed or (work.work and trace.summaries is not None):
            return trace_replica_function(self._strategy, fn, arguments)
        return trace

    def _made_of(self, trace: Trace, fn: Callable[..., Any], arguments: Arguments) -> Program:
        if not trace.follow_ups.work:
            return self._program_of(trace, name_of(fn))
        return FollowedProgram(
            trace,
            self._strategy.topology,
            name_of(fn),
            lambda: self._program_of(
                trace_replica_function(self._strategy, fn, arguments), name_of(fn)
            ),
        )

    def _program_of(self, trace: Trace, name: str) -> Program:
        placement = self._strategy.placement
        return program_of(
            trace,
            self._strategy.topology,
            name,
            placement.remote,
            is_remote=placement.is_remote,
        )

    def evaluate(self, trace: Trace, name: str, split: list[Any], shared: list[Any]) -> list[Any]:
        """Runs a trace that writes nothing; see `Executor.evaluate`."""
        return Program(trace, self._strategy.topology, name).run_for(split, shared)

    def lower(
        self,
        fn: Callable[..., Any],
        arguments: Arguments,
        topology: Topology | None = None,
        num_steps: int = 1,
    ) -> Any:
        """Traces a function and lowers it for a topology, without caching the program.

        The topology has one device group per replica and may be abstract; None means the strategy's
        own. Returns the result of `jax.jit(...).lower`.
        """
        devices: Topology = topology or self._strategy.topology
        trace = trace_replica_function(self._strategy, fn, arguments, devices)
        return program_of(trace, devices, name_of(fn)).lower(arguments, num_steps)

    def _trace(self, fn: Callable[..., Any], arguments: Arguments, topology: Topology) -> Trace:
        return trace_replica_function(self._strategy, fn, arguments, topology)


def program_of(
    trace: Trace,
    topology: Topology,
    name: str,
    remote: RemoteState | None = None,
    *,
    is_remote: bool = False,
) -> Program:
    """Returns a program of the class that the variables of a trace require.

    `remote` gives access to variables outside this process, or is None; `is_remote` is True if all
    variables are there. `name` is for messages.
    """
    program = _program_of(trace, topology, name, remote, is_remote=is_remote)
    if trace.summaries is not None:
        program.make_plain = functools.cache(
            lambda: _program_of(
                trace.without_summaries(), topology, name, remote, is_remote=is_remote
            )
        )
    return program


def _program_of(
    trace: Trace, topology: Topology, name: str, remote: RemoteState | None, *, is_remote: bool
) -> Program:
    if current_function_trace() is not None and not is_remote:
        # An sg.function compiles all parts of the step into its one program.
        return Program(trace, topology, name)
    if remote is not None and not (is_remote or remote.holds(trace)):
        remote = None
    if not is_offloaded(trace):
        ordered = in_order(trace.jaxpr) if remote is None and is_connected(topology) else None
        if ordered is not None:
            return OrderedProgram(trace, topology, name, ordered)
        return Program(trace, topology, name, remote)
    if remote is None and is_sharded(trace, topology):
        return ShardedProgram(trace, topology, name)
    return OffloadedProgram(trace, topology, name, remote)
