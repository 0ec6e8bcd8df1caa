"""`Program`: the compiled program of a traced replica function, for one step or many."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from stratagem.devices.abstract_devices import placeholder
from stratagem.devices.lockstep import record_program, run_together
from stratagem.devices.mesh import Topology, is_explicit
from stratagem.execution.programs.recompilations import Usage
from stratagem.execution.programs.steps import (
    EarlyProgram,
    IdsProgram,
    QueuedInput,
    ReplicaStep,
    StepProgram,
    input_bytes,
    is_large,
    loop_options,
)
from stratagem.execution.summary.kinds import StepSummaries
from stratagem.execution.tracing.arguments import Arguments
from stratagem.execution.tracing.errors import assigned_under_jit, explicit_in_jit
from stratagem.execution.tracing.functionalize import Trace
from stratagem.execution.tracing.lost_changes import agree_on_program
from stratagem.execution.tracing.remote_state import RemoteState
from stratagem.observe.profiling.recorder import observed_call


def placeholder_results(trace: Trace, topology: Topology) -> list[Any]:
    """Returns placeholder outputs for abstract devices; no variable changes."""
    several = topology.num_replicas > 1
    return [
        placeholder((topology.num_replicas, *aval.shape[1:]) if several else aval.shape, aval.dtype)
        for aval in trace.jaxpr.out_avals[len(trace.written) :]
    ]


class NoSummaries:
    """Takes the place of `StepSummaries` for a step without summaries."""

    def decide(self) -> bool:
        """Returns False: no program has fewer summaries."""
        return False

    def begin(self, constants: list[Any]) -> list[Any]:
        """Returns the program's constants."""
        return constants

    def end(self, results: list[Any], num_steps: int | None) -> list[Any]:
        """Returns the results."""
        del num_steps
        return results


class Program:
    """A step, compiled on first use for a single call and for loops over many steps.

    `remote` gives access to variables outside this process, or is None. `make_plain` returns a
    program of the same step without summaries.
    """

    def __init__(self, step: ReplicaStep, name: str, remote: RemoteState | None = None) -> None:
        self.step = step
        self.trace = step.trace
        self.usage = Usage()
        self._name = name
        self._topology = topology = step.topology
        self._devices = set(topology.all_devices or ())
        self._remote = remote
        self._ids: IdsProgram | None = None
        self._early: dict[tuple[int, int], EarlyProgram] = {}
        self._constants: list[Any] | None = None
        has_summaries = step.trace.summaries is not None
        self._summaries = StepSummaries(step.trace, topology) if has_summaries else NoSummaries()
        self.make_plain: Callable[[], Program] | None = None
        self._is_agreed = False
        self._single = step.compiled(many=False)
        self._many: dict[bool, Any] = {}  # by: with compiler options
        self._called: set[Callable[..., Any]] = set()
        self._queued_input = QueuedInput()

    def run(self, arguments: Arguments) -> Any:
        """Runs one step, stores its writes, and returns the result, plain with one replica."""
        if self._summaries.decide() and self.make_plain is not None:
            return self.make_plain().run(arguments)
        return self.run_for(arguments.split, arguments.shared)

    def run_for(self, split: list[Any], shared: list[Any]) -> Any:
        """Runs one step on flat arguments."""
        with observed_call(1, self.written_values, self.trains):
            return self._assembled(self._run(split, shared))

    def run_many(self, split: list[Any], shared: list[Any]) -> Any:
        """Runs all steps in the split arrays in one call on the devices.

        `split` arrays have steps on axis 0 and replicas on axis 1; with one replica, steps only.
        Results have steps on the leading axis of each component.
        """
        if self._topology.is_abstract:
            return self._assembled(placeholder_results(self.trace, self._topology))
        if self._summaries.decide() and self.make_plain is not None:
            return self.make_plain().run_many(split, shared)
        num_steps = len(split[0]) if split else 1
        with observed_call(num_steps, self.written_values, self.trains):
            if self._remote is not None or not self.step.may_loop:
                return self._assembled(self._run_one_by_one(split, shared))
            has_options = loop_options(self._topology) is not None
            if has_options not in self._many:
                self._many[has_options] = self.step.compiled(many=True)
            return self._assembled(self._call(self._many[has_options], split, shared))

    def written_values(self) -> list[Any]:
        """Returns the values of the variables that the step sets; ready when it is done."""
        return [*map(self.step.value, self.trace.written)]

    def trains(self) -> bool:
        """Returns True if a call is a training step."""
        return self.trace.trains

    def _run(self, split: list[Any], shared: list[Any]) -> list[Any]:
        if self._topology.is_abstract:
            return placeholder_results(self.trace, self._topology)
        if self._remote is None:
            return self._call(self._single, split, shared)
        return self._run_with(self._remote, split, shared)

    def _run_with(self, remote: RemoteState, split: list[Any], shared: list[Any]) -> list[Any]:
        """Runs one step that uses variables outside this process."""
        results: list[Any] = []

        def ids_of() -> list[Any]:
            if self._ids is None:
                self._ids = IdsProgram(self.trace, self._topology, self._name)
            return self._ids.run(self._pools(split, shared, []))

        def call(rows: list[Any]) -> list[Any]:
            outputs = self._call(self._single, split, shared, rows)
            results[:] = outputs[: self.trace.num_results]
            return outputs[self.trace.num_results :]

        def send_early(first: int, last: int, rows: list[Any]) -> list[Any]:
            program = self._early.get((first, last))
            if program is None:
                program = EarlyProgram(self.step.whole, self._topology, range(first, last))
                self._early[first, last] = program
            return program.run(self._pools(split, shared, rows))

        remote.run(self.step.whole, ids_of, call, send_early)
        for place, variable in self.trace.results.late:
            results[place] = self._for_each(variable.value)
        return results

    def _for_each(self, value: Any) -> jax.Array:
        """Returns a replicated result in the form of a per-replica result."""
        topology = self._topology
        if topology.num_replicas == 1:
            return value
        return topology.stack([value] * topology.num_local_replicas)

    def _run_one_by_one(self, split: list[Any], shared: list[Any]) -> list[Any]:
        """Runs steps in separate calls, because each fetches values from outside the program."""
        steps = [
            self._run([array[step] for array in split], shared) for step in range(len(split[0]))
        ]
        axis = 1 if self._topology.num_replicas > 1 else 0
        return [jnp.stack(results, axis) for results in zip(*steps, strict=True)]

    def _pools(self, split: list[Any], shared: list[Any], rows: list[Any]) -> dict[str, list[Any]]:
        return {
            "read_only": [partial(self.step.value, one) for one in self.trace.read_only],
            "written": [partial(self.step.value, one) for one in self.trace.written],
            "split": split,
            "shared": shared,
            "constant": self.trace.constants,
            "rows": rows,
        }

    def lower(self, arguments: Arguments, num_steps: int = 1) -> Any:
        """Lowers the program from shapes alone; the devices of the topology may be abstract."""
        function, shapes = self.step.with_shapes(arguments, num_steps)
        return function.lower(*shapes)

    def programs(self, arguments: Arguments) -> list[StepProgram]:
        """Returns all programs of one step in execution order, built from shapes alone."""
        return self.step.programs(arguments, self._name)

    def _call(
        self,
        function: Callable[..., Any],
        split: list[Any],
        shared: list[Any],
        rows: Sequence[Any] = (),
    ) -> list[Any]:
        shared = [*map(self._everywhere, shared)]
        written, read_only, constants = self._lasting_inputs()
        values, results, handed = self._start(
            function, (written, read_only, split, shared, constants, [*rows])
        )
        if values and isinstance(values[0], Tracer):
            raise assigned_under_jit(self.trace.written[0])
        self.step.written.replace(values)
        self.step.finish(handed, shared)
        return self._summaries.end(results, None if function is self._single else len(split[0]))

    def _start(self, function: Callable[..., Any], inputs: tuple[list[Any], ...]) -> Any:
        """Returns written values, results, and the arrays for updates of a call."""
        if self._topology.spans_processes:
            if not self._is_agreed:
                agree_on_program(self._name, self.trace.jaxpr)
                self._is_agreed = True

            def start() -> tuple[Any, Any]:
                values, results, token, handed = self._outputs(function, inputs)
                return (values, results, handed), token

            return run_together(self._name, start, platform=self._topology.platform)
        values, results, token, handed = self._outputs(function, inputs)
        if not isinstance(token, tuple):  # a call whose end nobody awaits has none
            record_program(token)
        if not isinstance(token, tuple | Tracer):
            _, _, split, shared, _, _ = inputs
            size_bytes = input_bytes([*split, *shared]) // self._topology.num_replicas
            if is_large(size_bytes):
                self._queued_input.add(token, size_bytes)
        return values, results, handed

    def _outputs(self, function: Callable[..., Any], inputs: tuple[list[Any], ...]) -> Any:
        if function in self._called:
            return function(*inputs)
        self._called.add(function)
        with paused_garbage_collection():
            return function(*inputs)

    def _lasting_inputs(self) -> tuple[list[Any], list[Any], list[Any]]:
        """Returns the values of written and read variables, and the constants."""
        step = self.step
        if self._constants is None:
            with jax.ensure_compile_time_eval():  # the constants outlive a jax.jit around this call
                self._constants = [*map(self._topology.replicate, self.trace.constants)]
        return (
            step.written.read(step.value),
            step.read_only.read(step.value),
            self._summaries.begin(self._constants),
        )

    def _everywhere(self, value: object) -> Any:
        """Moves an array committed to other devices; the compiled call moves all others."""
        if not isinstance(value, jax.Array):
            return value
        if isinstance(value, Tracer):
            if self._topology.num_replicas > 1 and is_explicit(value):
                raise explicit_in_jit(self._name)
            return value
        if self._topology.spans_processes:
            return self._topology.replicate(value)
        if not value.committed:
            return value
        if is_explicit(value):
            return self._topology.replicate(value)
        is_there = not self._devices or value.sharding.device_set == self._devices
        return value if is_there else self._topology.replicate(value)

    def _assembled(self, outputs: list[Any]) -> Any:
        return self.trace.results.assembled(outputs, self._topology)


# Pause of Python's cyclic garbage collection while a step is traced and compiled.
#
# A trace allocates objects that all stay until it ends. The collector would walk through them again
# and again: a tenth of the time of a large model's first step.


_lock = threading.Lock()
_num_pauses = 0


@contextlib.contextmanager
def paused_garbage_collection() -> Generator[None]:
    """Pauses garbage collection within the block, unless the program has turned it off itself."""
    global _num_pauses
    with _lock:
        is_first = _num_pauses == 0
        is_ours = gc.isenabled() or not is_first
        if is_ours:
            gc.disable()
            _num_pauses += 1
    try:
        yield
    finally:
        if is_ours:
            with _lock:
                _num_pauses -= 1
                if _num_pauses == 0:
                    gc.enable()
