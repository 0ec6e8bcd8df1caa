"""Compiled execution: one program for all replicas, kept by function, structure and shapes."""

from __future__ import annotations

import contextlib
import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from stratagem import config
from stratagem.context.function_trace import current_function_trace
from stratagem.execution.agreement import name_of
from stratagem.execution.arguments import Arguments, flatten_arguments
from stratagem.execution.exchange import Exchange
from stratagem.execution.function_identity import FunctionKeys
from stratagem.execution.joined_program import JoinedProgram, is_joined
from stratagem.execution.parted_program import PartedProgram, is_parted
from stratagem.execution.program import Program
from stratagem.execution.recompilations import Recompilations
from stratagem.execution.step_capture import offer_step
from stratagem.execution.trace import Trace
from stratagem.execution.tracing import trace_replica_function
from stratagem.summary.settings import trace_key
from stratagem.topology import Topology
from stratagem.topology.lockstep import compiling
from stratagem.variables import agree_on_initial_values, require_layouts_used

__all__ = ["CompiledExecution", "program_of"]


class CompiledExecution:
    """Runs replica functions as compiled programs and keeps the programs.

    Args:
        strategy: the strategy whose replicas run them; it has `topology` and `variables`.
    """

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        self._programs: OrderedDict[Any, Program] = OrderedDict()
        self._keys = FunctionKeys()
        self._recompilations = Recompilations()
        self.carries: dict[Any, Any] = {}  # of `run_steps`, by structure, shapes and dtypes

    @property
    def programs(self) -> list[Program]:
        """The programs that are kept, the one used last at the end."""
        return list(self._programs.values())

    def run(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Calls a function once a replica.

        Args:
            fn: the replica function.
            args: positional arguments, with `PerReplica` for what is split.
            kwargs: keyword arguments, likewise.

        Returns:
            The regrouped result.
        """
        if (function_trace := current_function_trace()) is not None:
            function_trace.note_strategy(self._strategy)
        arguments = flatten_arguments(
            args, kwargs, num_replicas=self._strategy.num_replicas_in_sync
        )
        return self.program(fn, arguments).run(arguments)

    def program(self, fn: Callable[..., Any], arguments: Arguments) -> Program:
        """Returns the program for a function and arguments, tracing it if there is none.

        Args:
            fn: the replica function.
            arguments: what it is called with.

        Returns:
            The program.
        """
        offer_step(self._strategy, fn, arguments, self._trace)
        is_inside = current_function_trace() is not None
        key = (self._keys.key(fn), arguments.structure, arguments.leaves, is_inside)
        program = self._programs.get(key)
        if program is not None and program.trace.summaries is not None:
            program = self._programs.get((key, trace_key()))
        if program is not None:
            self._programs.move_to_end(key)
            program.is_reused = True
            return program
        topology = self._strategy.topology
        with compiling(name_of(fn)) if topology.spans_processes else contextlib.nullcontext():
            trace = trace_replica_function(self._strategy, fn, arguments)
        if current_function_trace() is None:  # else that function asks for all that it calls
            agree_on_initial_values(self._strategy.variables, topology)
        if trace.written and self._strategy.keeping is not None:
            self._strategy.keeping.check()
        require_layouts_used(self._strategy.layouts, trace.written)
        program = self._programs[key] = program_of(
            trace,
            topology,
            name_of(fn),
            self._strategy.exchange,
            serves_all=self._strategy.serves_all,
        )
        if not is_inside:  # else the outer function was compiled again
            self._recompilations.note(fn, (arguments.structure, arguments.leaves), program)
        if trace.summaries is not None:
            self._programs[(key, trace_key())] = program
        while len(self._programs) > config.program_cache_size():
            self._programs.popitem(last=False)
        return program

    def lower(
        self,
        fn: Callable[..., Any],
        arguments: Arguments,
        topology: Topology | None = None,
        num_steps: int = 1,
    ) -> Any:
        """Traces a function for other devices and lowers it, without keeping the program.

        Args:
            fn: the replica function.
            arguments: what it is called with.
            topology: as many devices as there are replicas; they need not be there. None for those
                of the strategy.
            num_steps: how many steps a call has.

        Returns:
            What `jax.jit(...).lower` returns.
        """
        devices: Topology = topology or self._strategy.topology
        trace = trace_replica_function(self._strategy, fn, arguments, devices)
        return Program(trace, devices, name_of(fn)).lower(arguments, num_steps)

    def _trace(self, fn: Callable[..., Any], arguments: Arguments, topology: Topology) -> Trace:
        return trace_replica_function(self._strategy, fn, arguments, topology)


def program_of(
    trace: Trace,
    topology: Topology,
    name: str,
    exchange: Exchange | None = None,
    *,
    serves_all: bool = False,
) -> Program:
    """Returns the program of a trace, of the kind that its variables ask for.

    Args:
        trace: of the step.
        topology: the devices of the replicas.
        name: of the function, for messages.
        exchange: where variables are that are not in this process; None for none.
        serves_all: whether all of them are there.
    """
    program = _program_of(trace, topology, name, exchange, serves_all=serves_all)
    if trace.summaries is not None:
        program.make_plain = functools.cache(
            lambda: _program_of(
                trace.without_summaries(), topology, name, exchange, serves_all=serves_all
            )
        )
    return program


def _program_of(
    trace: Trace, topology: Topology, name: str, exchange: Exchange | None, *, serves_all: bool
) -> Program:
    if current_function_trace() is not None and not serves_all:
        # A function that holds the step has one program for all parts.
        return Program(trace, topology, name)
    if exchange is not None and not (serves_all or exchange.serves(trace)):
        exchange = None
    if not is_parted(trace):
        return Program(trace, topology, name, exchange)
    if exchange is None and is_joined(trace, topology):
        return JoinedProgram(trace, topology, name)
    return PartedProgram(trace, topology, name, exchange)
