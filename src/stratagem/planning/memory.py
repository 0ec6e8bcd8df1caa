"""What one device holds during a step: what is known of the variables, and the compilers' rest."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from stratagem.execution.programs.step_capture import CapturedStep
from stratagem.planning.accelerators import Accelerator
from stratagem.planning.programs import held_bytes, is_held_by_host, variables_of
from stratagem.variables import ShardedState, ShardedStore, VariableKind, home_of, store_of

__all__ = ["CompilerMemory", "MemoryPlan", "plan_memory", "shared_state_bytes"]


@dataclasses.dataclass(frozen=True)
class CompilerMemory:
    """What a compiler says of the memory of one program on one device.

    Args:
        argument_bytes: of what it is called with.
        output_bytes: of its results.
        alias_bytes: of the results that take the place of arguments.
        temp_bytes: of everything in between.
        code_bytes: of the program itself, where that lies on the device.
        lasting_bytes: of what it is called with and is there whether it runs or not.
        brought_bytes: of what it brings over from the host's memory; no part of the others.
        put_back_bytes: of what it puts back there; likewise.
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
        cls, analysis: Any, lasting_bytes: int, brought_bytes: int = 0, put_back_bytes: int = 0
    ) -> CompilerMemory:
        """Reads what `compiled.memory_analysis()` returns.

        Args:
            analysis: what it returned.
            lasting_bytes: of the program.
            brought_bytes: of the program.
            put_back_bytes: of the program.
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
        """Returns the memory of a device, of what a compiler says that counts the host's with it.

        That for CPUs does.
        """
        return dataclasses.replace(
            self,
            argument_bytes=self.argument_bytes - self.brought_bytes,
            output_bytes=self.output_bytes - self.put_back_bytes,
            alias_bytes=max(self.alias_bytes - self.put_back_bytes, 0),
        )

    @property
    def peak_bytes(self) -> int:
        """The most that the program takes with its arguments and results."""
        results = max(self.output_bytes - self.alias_bytes, 0)
        return self.argument_bytes + results + self.temp_bytes + self.code_bytes

    @property
    def passed_bytes(self) -> int:
        """What it is called with and is not there already."""
        return max(self.argument_bytes - self.lasting_bytes, 0)

    @property
    def passing_bytes(self) -> int:
        """What of that comes and goes with the program."""
        return max(self.peak_bytes - self.code_bytes - self.lasting_bytes, 0)


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """The memory of one device in bytes.

    Args:
        parameters_bytes: trainable variables.
        optimizer_bytes: what optimizers keep.
        other_state_bytes: all other variables: statistics, metrics, seeds; and constants.
        batch_bytes: this device's part of a batch.
        next_batch_bytes: of the batch that is on its way while the step runs.
        temporary_bytes: activations, gradients, variables that are gathered and workspace, by the
            compiler's schedule; with results that take no argument's place, and padding of its
            layouts. Of several programs those of the one that takes most.
        gradients_bytes: of all gradients at once, which are part of the temporaries: a compiler may
            use one before it computes the next.
        code_bytes: the programs.
        host_bytes: what the host needs for the variables that it keeps, pinned or not; no part of
            the device's.
        pool_bytes: what programs get of the device's memory by default.
        device_bytes: all of it.
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
        """All variables, which are there between steps, too."""
        return self.parameters_bytes + self.optimizer_bytes + self.other_state_bytes

    @property
    def total_bytes(self) -> int:
        """All that is there at the peak of a step."""
        return sum(size for _, size in self.parts())

    @property
    def fits(self) -> bool:
        """Whether that is within what programs get by default."""
        return self.total_bytes <= self.pool_bytes

    def parts(self) -> list[tuple[str, int]]:
        """What there is, by name; the sizes add up to the whole."""
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
    of_host: Sequence[CompilerMemory],
    accelerator: Accelerator,
) -> MemoryPlan:
    """Says what one device holds.

    Args:
        step: the training step.
        compiled: of its programs, compiled for the devices.
        of_host: of those that the host runs.
        accelerator: one of the devices.

    Returns:
        The plan. What the compiler counts beyond the arrays themselves, such as padding, is among
        the temporaries.
    """
    kept = {id(v) for optimizer in step.optimizers for v in optimizer.variables}
    topology = step.strategy.topology
    sizes = [(v, held_bytes(v, topology, store_of(v))) for v in variables_of(step.trace)]
    others = sum(size for v, size in sizes if not v.trainable and id(v) not in kept)
    others += sum(np.asarray(constant).nbytes for constant in step.trace.constants)
    batch = _batch_bytes(step)
    return MemoryPlan(
        parameters_bytes=sum(size for v, size in sizes if v.trainable and id(v) not in kept),
        optimizer_bytes=sum(size for v, size in sizes if id(v) in kept),
        other_state_bytes=others,
        batch_bytes=batch,
        next_batch_bytes=batch,
        temporary_bytes=max(one.passing_bytes for one in compiled),
        gradients_bytes=sum(held_bytes(v, topology) for v in step.trace.written if v.trainable),
        code_bytes=sum(one.code_bytes for one in compiled),
        host_bytes=_kept_on_host(step) + max((one.passing_bytes for one in of_host), default=0),
        pool_bytes=accelerator.pool_bytes,
        device_bytes=accelerator.memory_bytes,
    )


def _kept_on_host(step: CapturedStep) -> int:
    return sum(
        _host_copies(v, step) * math.prod(v.shape) * jax.numpy.dtype(v.dtype).itemsize
        for v in variables_of(step.trace)
        if is_held_by_host(store_of(v))
    )


def _host_copies(variable: Any, step: CapturedStep) -> int:
    """How often the host has a variable: once, or what has no parts for each device."""
    store, topology = store_of(variable), step.strategy.topology
    if not isinstance(store, ShardedStore):
        return 1
    is_offloaded = store.sharded_axis(tuple(variable.shape)) is not None
    return topology.num_logical_devices * (1 if is_offloaded else topology.num_replicas)


def shared_state_bytes(step: CapturedStep) -> dict[str, int]:
    """Says what variables one device would hold if the replicas shared state out.

    Args:
        step: a step whose variables are copied to all replicas.

    Returns:
        Bytes by `shard_state`; nothing where there is nobody to share with, or state is not copied.
    """
    topology = step.strategy.topology
    if topology.num_replicas == 1 or topology.groups or step.strategy.placement.uses_stores:
        return {}
    store = ShardedStore(topology)
    found: dict[str, int] = {}
    for shard_state in ("optimizer", "all"):
        policy = ShardedState(store, is_all=shard_state == "all")
        found[shard_state] = sum(
            held_bytes(v, topology, policy.choose(v, v.slot_of) if _may_share(v) else None)
            for v in variables_of(step.trace)
        )
    return found


def _may_share(variable: Any) -> bool:
    home = home_of(variable)
    return home is not None and home.kind is not VariableKind.ON_READ


def _batch_bytes(step: CapturedStep) -> int:
    replicas = step.strategy.num_replicas_in_sync
    total = 0
    for leaf in step.arguments.leaves:
        if leaf.shape is not None:
            size = math.prod(leaf.shape) * jax.numpy.dtype(leaf.dtype).itemsize
            total += size // replicas if leaf.split else size
    return total
