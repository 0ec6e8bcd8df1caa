"""Base compiled SPMD program of a traced replica function, for one step or many."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import jaxpr_as_fun
from jax.sharding import PartitionSpec, Sharding

from stratagem import environment
from stratagem.devices.abstract_devices import placeholder
from stratagem.devices.context_mesh import is_explicit
from stratagem.devices.lockstep import record_program, run_together
from stratagem.devices.mesh import Topology
from stratagem.devices.shards import local_copy
from stratagem.execution.analysis.replication import contains_primitive, has_collectives
from stratagem.execution.programs.convolutions import fast_on_cpu
from stratagem.execution.programs.ids_program import EarlyProgram, IdsProgram, StepProgram, shape_on
from stratagem.execution.programs.recompilations import Usage
from stratagem.execution.programs.variable_values import VariableValues, value_for_step
from stratagem.execution.summary.collector import is_tracing
from stratagem.execution.summary.kinds import forward_summaries
from stratagem.execution.summary.writer import Recording, begin_recording
from stratagem.execution.tracing.arguments import Arguments
from stratagem.execution.tracing.errors import assigned_under_jit, explicit_in_jit
from stratagem.execution.tracing.functionalize import Trace
from stratagem.execution.tracing.garbage_collection import paused_garbage_collection
from stratagem.execution.tracing.lost_changes import agree_on_program
from stratagem.execution.tracing.remote_state import RemoteState, inputs_of
from stratagem.observe.profiling.recorder import UNOBSERVED, current_observer, observed_call
from stratagem.observe.run_events.process_writer import current_events
from stratagem.variables.distributed import PerReplica
from stratagem.variables.late_reads import read_before_replacing
from stratagem.variables.layouts import stored_sharding

if TYPE_CHECKING:
    from jax.extend.core import Jaxpr

# Results of a step: arrays in the structure that the replica function returned.


def assemble_results(trace: Trace, outputs: list[Any], topology: Topology) -> Any:
    """Returns the result of a replica function, plain with one replica."""
    several = topology.num_replicas > 1
    leaves: list[Any] = []
    for (is_array, value), lengths in zip(trace.results, trace.result_lengths, strict=True):
        if not is_array:
            leaves.append(value)
        elif several:
            leaves.append(PerReplica(stacked=outputs[value], lengths=lengths))
        else:
            output = local_copy(outputs[value], topology)
            leaves.append(output if lengths is None else output[: lengths[0]])
    return jax.tree.unflatten(trace.result_structure, leaves)


def placeholder_results(trace: Trace, topology: Topology) -> list[Any]:
    """Returns placeholder outputs for abstract devices; no variable changes."""
    several = topology.num_replicas > 1
    return [
        placeholder((topology.num_replicas, *aval.shape[1:]) if several else aval.shape, aval.dtype)
        for aval in trace.jaxpr.out_avals[len(trace.written) :]
    ]


# Bound on the memory of inputs of calls that the devices have not finished.

# JAX lets the host run up to 32 calls ahead of the devices, and each holds its input.
_MOST_CALLS_OF_JAX = 32
_MOST_BYTES = 1 << 30
# One call runs and one waits, however large they are, so that the devices are never idle.
_LEAST_CALLS = 2


class _UndonatedOutput(Protocol):
    def block_until_ready(self) -> object: ...


class QueuedInput:
    """Waits for earlier calls of a program while too much of their input is on a device."""

    def __init__(self) -> None:
        self._calls: collections.deque[tuple[_UndonatedOutput, int]] = collections.deque()
        self._total_bytes = 0

    def add(self, output: _UndonatedOutput, size_bytes: int) -> None:
        """Counts a call that has just started, by an output that no later program donates."""
        self._calls.append((output, size_bytes))
        self._total_bytes += size_bytes
        while self._total_bytes > _MOST_BYTES and len(self._calls) > _LEAST_CALLS:
            first, first_bytes = self._calls.popleft()
            self._total_bytes -= first_bytes
            first.block_until_ready()


def is_large(size_bytes: int) -> bool:
    """Returns True if JAX's own limit lets too much input of this size wait on a device."""
    return size_bytes * _MOST_CALLS_OF_JAX > _MOST_BYTES


def input_bytes(arrays: Sequence[Any]) -> int:
    """Returns the size of arrays or of values in a trace; other values count as nothing."""
    return sum(array.size * array.dtype.itemsize for array in arrays if hasattr(array, "dtype"))


# Compiler options of a program, and if it unrolls its loop over steps.

# XLA:GPU since 0.11 copies a step's slice of an input, such as the labels, on a second stream. An
# asynchronous operation has the whole loop reordered for overlap, without regard for memory or
# caches: all gradients of weights, then all updates. ResNet-50 then takes 2.3 GB more.
_COPIES_OF_SLICES = "dynamic-slice-copy-fusion-async-wrapper"


def loop_options(topology: Topology) -> dict[str, str] | None:
    """Returns the options for a loop over steps on these devices; None for XLA's defaults.

    JAX accepts none for a program that is called within another one.
    """
    if topology.platform != "gpu" or is_tracing():
        return None
    # An option replaces the value of XLA_FLAGS.
    return {
        "xla_disable_hlo_passes": ",".join([*environment.disabled_xla_passes(), _COPIES_OF_SLICES])
    }


def sequence_options(trace: Trace, topology: Topology) -> dict[str, str] | None:
    """Returns the options for sequences in parts on TPUs; None without.

    The compiler would pass keys and values on in a ring while it computes with each part. It then
    keeps the scores of all parts, which takes three times the memory. So it has to gather them.
    """
    if not trace.splits_sequences or topology.platform != "tpu":
        return None
    return {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"}


def unrolls_steps(jaxpr: Jaxpr, topology: Topology) -> bool:
    """Returns True if the loop over steps is unrolled.

    XLA:CPU computes gradients of convolutions 30 times slower in a loop body.
    """
    devices = topology.devices or jax.local_devices()
    return devices[0].platform == "cpu" and contains_primitive(jaxpr, "conv_general_dilated")


# Summaries of a step: each call decides whether to record them.


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
        if self._recording is None and not is_tracing():  # a user's jax.jit always records
            return constants
        place = self._trace.records
        assert place is not None
        return [*constants[:place], self._true, *constants[place + 1 :]]

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


# Groups of a program's inputs, in order.
POOLS: Sequence[str] = ("written", "read_only", "split", "shared", "constant", "rows")


class Program:
    """One trace, compiled on first use for a single step and for loops over many steps.

    `remote` gives access to variables outside this process, or is None. `make_plain` returns a
    program of the same step without summaries, or is None.
    """

    _num_handed = 0  # number of trailing outputs for offloaded updates
    _may_loop = True  # True if steps may loop on the devices

    def __init__(
        self, trace: Trace, topology: Topology, name: str, remote: RemoteState | None = None
    ) -> None:
        self._whole = trace
        self._stages = [] if remote is None else trace.stages
        if self._stages:
            trace = trace.after_sending(self._stages[-1])
        self.trace = trace
        self.usage = Usage()
        self._remote = remote
        self._ids: Any = None
        self._early: dict[tuple[int, int], EarlyProgram] = {}
        self._name = name
        self._is_agreed = not topology.spans_processes
        self._topology = topology
        self._devices = set(topology.all_devices or ())
        # The compiler adds those of replicas of several devices.
        self._has_collectives = topology.groups is not None or has_collectives(trace.jaxpr.jaxpr)
        self._written = VariableValues(trace.written, topology)
        self._read_only = VariableValues(trace.read_only, topology)
        self._constants: list[Any] | None = None
        self._summaries = None if trace.summaries is None else StepSummaries(trace, topology)
        self.make_plain: Callable[[], Program] | None = None
        self._step = self._compile(many=False)
        self._many: dict[bool, Any] = {}  # by: with compiler options
        self._called: set[Callable[..., Any]] = set()
        self._queued_input = QueuedInput()

    def run(self, arguments: Arguments) -> Any:
        """Runs one step, stores its writes, and returns the result, plain with one replica."""
        if (plain := self._without_summaries()) is not None:
            return plain.run(arguments)
        return self.run_for(arguments.split, arguments.shared)

    def run_for(self, split: list[Any], shared: list[Any]) -> Any:
        """Runs one step on flat arguments."""
        with self._observed(1):
            return self._assemble(self._run(split, shared))

    def run_many(self, split: list[Any], shared: list[Any]) -> Any:
        """Runs all steps in the split arrays in one call on the devices.

        `split` arrays have steps on axis 0 and replicas on axis 1; with one replica, steps only.
        Results have steps on the leading axis of each component.
        """
        if self._topology.is_abstract:
            return self._assemble(placeholder_results(self.trace, self._topology))
        if (plain := self._without_summaries()) is not None:
            return plain.run_many(split, shared)
        with self._observed(len(split[0]) if split else 1):
            if self._remote is not None or not self._may_loop:
                return self._assemble(self._run_one_by_one(split, shared))
            has_options = loop_options(self._topology) is not None
            if has_options not in self._many:
                self._many[has_options] = self._compile(many=True)
            return self._assemble(self._call(self._many[has_options], split, shared))

    def _observed(self, num_steps: int) -> contextlib.AbstractContextManager[None]:
        """Returns a context for a call that a profile may count as steps."""
        if current_observer() is None:
            return UNOBSERVED
        values = partial(map, self._value, self.trace.written)
        return observed_call(num_steps, lambda: [*values()], trains=self.trace.trains)

    def _without_summaries(self) -> Program | None:
        """Returns the plain program if this call records no summaries; otherwise None."""
        is_plain = self._summaries is not None and self._summaries.decide()
        return self.make_plain() if is_plain and self.make_plain is not None else None

    def _run(self, split: list[Any], shared: list[Any]) -> list[Any]:
        if self._topology.is_abstract:
            return placeholder_results(self.trace, self._topology)
        if self._remote is None:
            return self._call(self._step, split, shared)
        results: list[Any] = []

        def call(rows: list[Any]) -> list[Any]:
            outputs = self._call(self._step, split, shared, rows)
            results[:] = outputs[: self.trace.num_results]
            return outputs[self.trace.num_results :]

        self._remote.run(
            self._whole,
            lambda: self._ids_of_lookups(split, shared),
            call,
            partial(self._send_early, split, shared),
        )
        for place, variable in self.trace.late:
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

    def _ids_of_lookups(self, split: list[Any], shared: list[Any]) -> list[Any]:
        if self._ids is None:
            self._ids = IdsProgram(self.trace, self._topology, self._name)
        return self._ids.run(self._pools(split, shared, []))

    def _send_early(
        self, split: list[Any], shared: list[Any], first: int, last: int, rows: list[Any]
    ) -> list[Any]:
        """Returns some of the values that the step sends; it stores nothing."""
        program = self._early.get((first, last))
        if program is None:
            program = EarlyProgram(self._whole, self._topology, range(first, last))
            self._early[first, last] = program
        return program.run(self._pools(split, shared, rows))

    def _pools(self, split: list[Any], shared: list[Any], rows: list[Any]) -> dict[str, list[Any]]:
        return {
            "read_only": [partial(self._value, variable) for variable in self.trace.read_only],
            "written": [partial(self._value, variable) for variable in self.trace.written],
            "split": split,
            "shared": shared,
            "constant": self.trace.constants,
            "rows": rows,
        }

    def lower(self, arguments: Arguments, num_steps: int = 1) -> Any:
        """Lowers the program from shapes alone; the devices of the topology may be abstract."""
        function, shapes = self.with_shapes(arguments, num_steps)
        return function.lower(*shapes)

    def with_shapes(self, arguments: Arguments, num_steps: int = 1) -> tuple[Any, tuple[Any, ...]]:
        """Returns the jitted function and its arguments as shapes with shardings."""
        topology = self._topology
        many = num_steps > 1
        copied, split = topology.replicated, topology.stacked_steps if many else topology.stacked
        steps = (num_steps,) if many else ()
        if topology.num_replicas == 1:
            split = copied

        leaves = [leaf for leaf in arguments.leaves if leaf.shape is not None]
        return self._compile(many=many), (
            [self._shape_for_step(variable) for variable in self.trace.written],
            [self._shape_for_step(variable) for variable in self.trace.read_only],
            [shape_on(leaf, split, steps) for leaf in leaves if leaf.split],
            [shape_on(leaf, copied) for leaf in leaves if not leaf.split],
            [shape_on(jnp.asarray(constant), copied) for constant in self.trace.constants],
            self._row_shapes(split),
        )

    def programs(self, arguments: Arguments) -> list[StepProgram]:
        """Returns all programs of one step in execution order, built from shapes alone."""
        function, shapes = self.with_shapes(arguments)
        places = zip(
            [*self._written.places, *self._read_only.places], [*shapes[0], *shapes[1]], strict=True
        )
        lasting = [shape for place, shape in places if place.is_on_devices]
        lasting += [shape for pool in shapes[2:-1] for shape in pool]  # all but looked-up rows
        return [StepProgram("replicas", function, shapes, lasting, num_donated=1)]

    def _shape_for_step(self, variable: object) -> jax.ShapeDtypeStruct:
        """Returns the shape and sharding of a variable as a program input."""
        return shape_on(self._value(variable), self._sharding(variable))

    def _value(self, variable: object) -> Any:
        return value_for_step(variable)

    def _row_shapes(self, split: Sharding) -> list[jax.ShapeDtypeStruct]:
        """Returns the shapes of looked-up rows that come from outside the program."""
        count = self._topology.num_replicas
        several = (count,) if count > 1 else ()
        return [shape_on(one, split, several) for one in inputs_of(self.trace.lookups)]

    def _call(
        self,
        function: Callable[..., Any],
        split: list[Any],
        shared: list[Any],
        rows: Sequence[Any] = (),
    ) -> list[Any]:
        written, read_only, constants = self._lasting_inputs()
        shared = [self._everywhere(value) for value in shared]
        summaries = self._summaries
        starts = self._topology.spans_processes
        if starts and not self._is_agreed:
            agree_on_program(self._name, self.trace.jaxpr)
            self._is_agreed = True

        handed: list[Any] = []

        def start() -> tuple[Any, Any]:
            is_first = function not in self._called
            self._called.add(function)
            with paused_garbage_collection() if is_first else contextlib.nullcontext():
                outputs = function(written, read_only, split, shared, constants, list(rows))
            handed[:] = outputs[3]
            return outputs[:2], outputs[2]

        token: Any = ()
        if starts:
            new_values, results = run_together(
                self._name,
                start,
                platform=self._topology.platform,
                has_collectives=self._has_collectives,
            )
        else:
            (new_values, results), token = start()
            record_program(token)
        if new_values and isinstance(new_values[0], Tracer):
            raise assigned_under_jit(self.trace.written[0])
        self._written.replace(new_values)
        if not (starts or isinstance(token, tuple | Tracer)):
            self._bound_input(token, [*split, *shared])
        self._finish(handed, shared)
        if summaries is None:
            return results
        return summaries.end(results, None if function is self._step else len(split[0]))

    def _bound_input(self, token: Any, arguments: list[Any]) -> None:
        """Waits for earlier calls if this and they hold too much input on each device."""
        size_bytes = input_bytes(arguments) // self._topology.num_replicas
        if is_large(size_bytes):
            self._queued_input.add(token, size_bytes)

    def _lasting_inputs(self) -> tuple[list[Any], list[Any], list[Any]]:
        """Returns the values of written and read variables, and the constants."""
        read_before_replacing()
        written, read_only = self._written.read(self._value), self._read_only.read(self._value)
        if self._constants is None:
            with jax.ensure_compile_time_eval():  # the constants outlive a jax.jit around this call
                self._constants = [
                    self._topology.replicate(value) for value in self.trace.constants
                ]
        constants = self._constants
        if self._summaries is not None:
            constants = self._summaries.begin(constants)
        return written, read_only, constants

    def _finish(self, handed: list[Any], shared: list[Any]) -> None:
        """Processes sums for offloaded updates, equal on all replicas; does nothing here."""

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

    def _compile(self, *, many: bool) -> Any:
        function = self._function(many=many)
        if self._topology.num_replicas > 1:
            copied, stacked = PartitionSpec(), PartitionSpec(self._topology.replica_axis)
            steps = PartitionSpec(None, self._topology.replica_axis)
            written = [place.spec for place in self._written.places]
            function = jax.shard_map(
                function,
                mesh=self._topology.mesh,
                in_specs=(
                    written,
                    [place.spec for place in self._read_only.places],
                    steps if many else stacked,
                    copied,
                    copied,
                    stacked,
                ),
                out_specs=(written, stacked, copied, copied),
                axis_names={*self._topology.replica_axes},
                check_vma=False,
            )
        return self._jit(function, many=many)

    def _jit(self, function: Callable[..., Any], *, many: bool) -> Any:
        return jax.jit(
            function,
            donate_argnums=0,
            out_shardings=self._out_shardings(),
            compiler_options=sequence_options(self.trace, self._topology)
            or (loop_options(self._topology) if many else None),
        )

    def _function(self, *, many: bool) -> Callable[..., Any]:
        """Returns the function of one replica that is compiled."""
        return self._many_steps if many else self._one_step

    def _out_shardings(self) -> Any:
        """Returns output shardings; None with one device per replica, where JAX infers them."""
        if self._topology.groups is None:
            return None
        copied = self._topology.replicated
        stacked = self._topology.stacked if self._topology.num_replicas > 1 else copied
        written = [self._sharding(variable) for variable in self.trace.written]
        return written, stacked, copied, copied

    def _sharding(self, variable: object) -> Sharding:
        """Returns the sharding of a variable as an input or output of the program."""
        return stored_sharding(variable, self._topology)

    def _one_step(self, *arrays: list[Any]) -> tuple[list[Any], list[Any], Any, list[Any]]:
        """Runs one step on one list of arrays per entry of `POOLS`.

        Returns written values, results, a token, and the arrays for offloaded updates.
        """
        pools = dict(zip(POOLS, arrays, strict=True))
        inputs = [pools[source][index] for source, index in self.trace.inputs]
        outputs = self._evaluate(inputs, pools["written"])
        values, results = outputs[: len(pools["written"])], outputs[len(pools["written"]) :]
        end = len(results) - self._num_handed
        token = self._token([*pools["split"], *pools["shared"]])
        return list(values), list(results[:end]), token, list(results[end:])

    def _evaluate(self, inputs: list[Any], written: list[Any]) -> list[Any]:
        """Returns new values for all that is written, then the other outputs of a step."""
        return jaxpr_as_fun(fast_on_cpu(self.trace.jaxpr, self._topology))(*inputs)

    def _token(self, arguments: Sequence[Any]) -> Any:
        """Returns an output that is never donated, if the end of the call is awaited."""
        is_awaited = self._topology.spans_processes or current_events() is not None
        is_awaited = is_awaited or is_large(input_bytes(arguments))
        return jnp.zeros((), bool) if is_awaited else ()

    def _many_steps(
        self,
        written: list[Any],
        read_only: list[Any],
        split: list[Any],
        shared: list[Any],
        constants: list[Any],
        rows: list[Any],
    ) -> tuple[list[Any], list[Any], Any, list[Any]]:
        def step(carry: list[Any], parts: list[Any]) -> tuple[list[Any], Any]:
            carry, results, _, _ = self._one_step(carry, read_only, parts, shared, constants, rows)
            return carry, results

        is_unrolled = unrolls_steps(self.trace.jaxpr.jaxpr, self._topology)
        written, results = jax.lax.scan(step, written, split, unroll=is_unrolled)
        if self._topology.num_replicas > 1:  # the replica axis first, as in every PerReplica
            results = [jnp.swapaxes(result, 0, 1) for result in results]
        return written, results, self._token([*split, *shared]), []

    def _assemble(self, outputs: list[Any]) -> Any:
        return assemble_results(self.trace, outputs, self._topology)
