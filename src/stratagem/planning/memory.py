"""Memory of one device during a step: variables from their shapes, the rest from the compiler."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Generator, Sequence
from typing import Any

import jax
import numpy as np

from stratagem.devices.mesh import Topology
from stratagem.execution.programs.lockstep import program_of
from stratagem.execution.programs.steps import StepProgram
from stratagem.execution.tracing.functionalize import CapturedStep, Trace
from stratagem.planning.targets import Accelerator
from stratagem.variables.layouts import Store, store_of, stored_sharding
from stratagem.variables.placement import ShardedState, ShardedStore
from stratagem.variables.registry import VariableKind, home_of

# Programs of a step on given devices, and the sizes of its variables there.


@contextlib.contextmanager
def step_programs(step: CapturedStep, topology: Topology) -> Generator[list[StepProgram]]:
    """Yields the programs of a step in execution order; lower them inside the context.

    `topology` has as many devices as the step was traced for. Sharded variables are on it within
    the context.
    """
    moved: list[tuple[Any, Any]] = []
    try:
        for variable in variables_of(step.trace):
            store = store_of(variable)
            if isinstance(store, ShardedStore):
                moved.append((variable, store))
                variable.store = dataclasses.replace(store, topology=topology)
        # A trace is specific to its kind of devices.
        trace = step.retrace(step.arguments, topology)
        yield program_of(trace, topology, "step").programs(step.arguments)
    finally:
        for variable, store in moved:
            variable.store = store


def variables_of(trace: Trace) -> list[Any]:
    """Returns the variables that a step uses, without duplicates."""
    return list({id(variable): variable for variable in trace.variables}.values())


def device_bytes(shape: jax.ShapeDtypeStruct) -> int:
    """Returns the bytes of one device's shard of an array."""
    part = shape.shape if shape.sharding is None else shape.sharding.shard_shape(shape.shape)
    return math.prod(part) * shape.dtype.itemsize


def is_held_by_host(store: Store | None) -> bool:
    """Returns True if a variable takes no device memory between steps."""
    return store is not None and (store.is_pinned or not store.is_on_replicas)


def held_bytes(variable: Any, topology: Topology, store: Store | None = None) -> int:
    """Returns the bytes that one device stores for a variable between steps."""
    shape = tuple(variable.shape)
    home = home_of(variable)
    if is_held_by_host(store):
        return 0
    if store is not None:
        shape = store.sharding(shape).shard_shape(shape)
    elif home is not None and home.kind is not VariableKind.ON_READ:  # one component per replica
        shape = stored_sharding(variable, topology).shard_shape(shape)
    return math.prod(shape) * jax.numpy.dtype(variable.dtype).itemsize


@dataclasses.dataclass(frozen=True)
class CompilerMemory:
    """Memory of one program on one device, as reported by the compiler.

    Args:
        argument_bytes: size of the arguments.
        output_bytes: size of the results.
        alias_bytes: size of the results that reuse argument buffers.
        temp_bytes: size of temporaries.
        code_bytes: size of the program itself, if stored on the device.
        lasting_bytes: size of the arguments that exist between steps, too.
        brought_bytes: bytes copied from pinned host memory; not included in the others.
        put_back_bytes: bytes copied back to pinned host memory; not included in the others.
    """

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    code_bytes: int = 0
    lasting_bytes: int = 0
    brought_bytes: int = 0
    put_back_bytes: int = 0

    @classmethod
    def of(
        cls,
        analysis: Any,
        lasting_bytes: int,
        brought_bytes: int = 0,
        put_back_bytes: int = 0,
    ) -> CompilerMemory:
        """Creates it from the result of `compiled.memory_analysis()`.

        Args:
            analysis: the result.
            lasting_bytes: size of the arguments that exist between steps.
            brought_bytes: bytes that the program copies from pinned host memory.
            put_back_bytes: bytes that the program copies back.
        """
        memory = cls(
            argument_bytes=analysis.argument_size_in_bytes,
            output_bytes=analysis.output_size_in_bytes,
            alias_bytes=analysis.alias_size_in_bytes,
            temp_bytes=analysis.temp_size_in_bytes,
            code_bytes=analysis.generated_code_size_in_bytes,
            lasting_bytes=lasting_bytes,
            brought_bytes=brought_bytes,
            put_back_bytes=put_back_bytes,
        )
        return memory if analysis.host_argument_size_in_bytes else memory.without_host()

    def without_host(self) -> CompilerMemory:
        """Returns the device memory of an analysis that includes host memory, as on CPU."""
        return dataclasses.replace(
            self,
            argument_bytes=self.argument_bytes - self.brought_bytes,
            output_bytes=self.output_bytes - self.put_back_bytes,
            alias_bytes=max(self.alias_bytes - self.put_back_bytes, 0),
        )

    @property
    def peak_bytes(self) -> int:
        """Peak memory of the program, including arguments and results."""
        results = max(self.output_bytes - self.alias_bytes, 0)
        return self.argument_bytes + results + self.temp_bytes + self.code_bytes

    @property
    def passed_bytes(self) -> int:
        """Size of the arguments that do not exist between steps."""
        return max(self.argument_bytes - self.lasting_bytes, 0)

    @property
    def passing_bytes(self) -> int:
        """Memory that is used only while the program runs."""
        return max(self.peak_bytes - self.code_bytes - self.lasting_bytes, 0)


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Memory of one device in bytes.

    Args:
        parameters_bytes: trainable variables.
        optimizer_bytes: optimizer state.
        other_state_bytes: all other variables (statistics, metrics, seeds), and constants.
        batch_bytes: this device's part of a batch.
        next_batch_bytes: the batch in transfer while the step runs.
        temporary_bytes: activations, gradients, gathered variables and workspace by the compiler's
            schedule, with results that reuse no argument, and layout padding. The largest
            program's, if there are several.
        gradients_bytes: all gradients at once, for comparison: they are part of
            `temporary_bytes`, and the compiler may consume one before computing the next.
        code_bytes: the programs.
        host_bytes: host memory for variables stored there, pinned or not; not part of the device's.
        pool_bytes: memory that JAX gives to programs by default.
        device_bytes: memory of the device.

    Example:
        >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(2)])
        >>> model.compile("adam", "mse")
        >>> memory = sg.plan(model, (np.ones((16, 8)), np.ones((16, 2))), "2xH100").memory
        >>> memory.parts()[:2], memory.total_bytes < memory.pool_bytes
        ([('parameters', 72), ('optimizer', 152)], True)

    Source: specific to Stratagem.
    """

    parameters_bytes: int
    optimizer_bytes: int
    other_state_bytes: int
    batch_bytes: int
    next_batch_bytes: int
    temporary_bytes: int
    gradients_bytes: int
    code_bytes: int
    host_bytes: int
    pool_bytes: int
    device_bytes: int

    @property
    def state_bytes(self) -> int:
        """All variables, which are stored between steps, too."""
        return self.parameters_bytes + self.optimizer_bytes + self.other_state_bytes

    @property
    def total_bytes(self) -> int:
        """Total at the peak of a step."""
        return sum(size for _, size in self.parts())

    @property
    def fits(self) -> bool:
        """True if the total is within the memory that JAX gives to programs by default."""
        return self.total_bytes <= self.pool_bytes

    def parts(self) -> list[tuple[str, int]]:
        """Returns (name, bytes) pairs that sum to the total."""
        return [
            ("parameters", self.parameters_bytes),
            ("optimizer", self.optimizer_bytes),
            ("other state", self.other_state_bytes),
            ("batch", self.batch_bytes),
            ("next batch", self.next_batch_bytes),
            ("activations and gradients", self.temporary_bytes),
            ("program", self.code_bytes),
        ]


def plan_memory(
    step: CapturedStep,
    compiled: Sequence[CompilerMemory],
    host_programs: Sequence[CompilerMemory],
    accelerator: Accelerator,
) -> MemoryPlan:
    """Computes the memory of one device from its compiled programs and the host's.

    Compiler overhead beyond the arrays, such as padding, counts as temporaries.
    """
    slots = {id(v) for optimizer in step.optimizers for v in optimizer.variables}
    topology = step.strategy.topology
    sizes = [(v, held_bytes(v, topology, store_of(v))) for v in variables_of(step.trace)]
    others = sum(size for v, size in sizes if not v.trainable and id(v) not in slots)
    others += sum(np.asarray(constant).nbytes for constant in step.trace.constants)
    batch = _batch_bytes(step)
    on_host = [v for v in variables_of(step.trace) if is_held_by_host(store_of(v))]
    passing = max((one.passing_bytes for one in host_programs), default=0)
    return MemoryPlan(
        parameters_bytes=sum(size for v, size in sizes if v.trainable and id(v) not in slots),
        optimizer_bytes=sum(size for v, size in sizes if id(v) in slots),
        other_state_bytes=others,
        batch_bytes=batch,
        next_batch_bytes=batch,
        temporary_bytes=max(one.passing_bytes for one in compiled),
        gradients_bytes=sum(held_bytes(v, topology) for v in step.trace.written if v.trainable),
        code_bytes=sum(one.code_bytes for one in compiled),
        host_bytes=sum(_whole_bytes(v) * _host_copies(v, topology) for v in on_host) + passing,
        pool_bytes=accelerator.pool_bytes,
        device_bytes=accelerator.memory_bytes,
    )


def _whole_bytes(array: Any) -> int:
    return math.prod(array.shape) * jax.numpy.dtype(array.dtype).itemsize


def _host_copies(variable: Any, topology: Topology) -> int:
    """Returns the number of copies in host memory: one, or one per device that has no shard."""
    store = store_of(variable)
    if not isinstance(store, ShardedStore):
        return 1
    is_offloaded = store.sharded_axis(tuple(variable.shape)) is not None
    num_copies = topology.num_replicas // (topology.num_shards if is_offloaded else 1)
    return topology.num_logical_devices * num_copies


def shared_state_bytes(step: CapturedStep) -> dict[str, int]:
    """Returns the bytes per device under each `shard_state`; empty if nothing is replicated."""
    topology = step.strategy.topology
    if topology.num_replicas == 1 or topology.groups or step.strategy.placement.uses_stores:
        return {}
    store = ShardedStore(topology)
    found: dict[str, int] = {}
    for shard_state in ("optimizer", "all"):
        policy = ShardedState(store, shard_state)
        found[shard_state] = sum(
            held_bytes(v, topology, policy.choose(v, v.slot_of) if _is_shardable(v) else None)
            for v in variables_of(step.trace)
        )
    return found


def _is_shardable(variable: object) -> bool:
    home = home_of(variable)
    return home is not None and home.kind is not VariableKind.ON_READ


def _batch_bytes(step: CapturedStep) -> int:
    replicas = step.strategy.num_replicas_in_sync
    return sum(
        _whole_bytes(leaf) // (replicas if leaf.split else 1)
        for leaf in step.arguments.leaves
        if leaf.shape is not None
    )
