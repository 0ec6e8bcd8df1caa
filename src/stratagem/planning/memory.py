"""What one device holds during a step: what is known of the variables, and the compiler's rest."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import numpy as np

from stratagem.execution.step_capture import CapturedStep
from stratagem.planning.accelerators import Accelerator

__all__ = ["CompilerMemory", "MemoryPlan", "plan_memory"]


@dataclasses.dataclass(frozen=True)
class CompilerMemory:
    """What a compiler says of the memory of one program on one device.

    Args:
        argument_bytes: of what it is called with.
        output_bytes: of its results.
        alias_bytes: of the results that take the place of arguments.
        temp_bytes: of everything in between.
        code_bytes: of the program itself, where that lies on the device.
    """

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    code_bytes: int = 0

    @classmethod
    def of(cls, analysis: Any) -> CompilerMemory:
        """Reads what `compiled.memory_analysis()` returns."""
        return cls(
            argument_bytes=analysis.argument_size_in_bytes,
            output_bytes=analysis.output_size_in_bytes,
            alias_bytes=analysis.alias_size_in_bytes,
            temp_bytes=analysis.temp_size_in_bytes,
            code_bytes=analysis.generated_code_size_in_bytes,
        )

    @property
    def peak_bytes(self) -> int:
        """The most that the program takes with its arguments and results."""
        results = max(self.output_bytes - self.alias_bytes, 0)
        return self.argument_bytes + results + self.temp_bytes + self.code_bytes


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """The memory of one device in bytes.

    Args:
        parameters_bytes: trainable variables.
        optimizer_bytes: what optimizers keep.
        other_state_bytes: all other variables: statistics, metrics, seeds; and constants.
        batch_bytes: this device's part of a batch.
        next_batch_bytes: of the batch that is on its way while the step runs.
        temporary_bytes: activations, gradients and workspace, by the compiler's schedule; with
            results that take no argument's place, and padding of its layouts.
        gradients_bytes: of all gradients at once, which are part of the temporaries: a compiler may
            use one before it computes the next.
        code_bytes: the program.
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
    pool_bytes: int
    device_bytes: int

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
    step: CapturedStep, compiled: CompilerMemory, accelerator: Accelerator
) -> MemoryPlan:
    """Says what one device holds.

    Args:
        step: the training step.
        compiled: of the step, compiled for the devices.
        accelerator: one of them.

    Returns:
        The plan. What the compiler counts beyond the arrays themselves, such as padding, is among
        the temporaries.
    """
    kept = {id(v) for optimizer in step.optimizers for v in optimizer.variables}
    variables = [*step.trace.written, *step.trace.read_only]
    optimizer = sum(_bytes(v) for v in variables if id(v) in kept)
    parameters = sum(_bytes(v) for v in variables if v.trainable and id(v) not in kept)
    others = sum(_bytes(v) for v in variables if not v.trainable and id(v) not in kept)
    others += sum(np.asarray(constant).nbytes for constant in step.trace.constants)
    batch = _batch_bytes(step)
    known = parameters + optimizer + others + batch
    return MemoryPlan(
        parameters_bytes=parameters,
        optimizer_bytes=optimizer,
        other_state_bytes=others,
        batch_bytes=batch,
        next_batch_bytes=batch,
        temporary_bytes=max(compiled.peak_bytes - compiled.code_bytes - known, 0),
        gradients_bytes=sum(_bytes(v) for v in step.trace.written if v.trainable),
        code_bytes=compiled.code_bytes,
        pool_bytes=accelerator.pool_bytes,
        device_bytes=accelerator.memory_bytes,
    )


def _batch_bytes(step: CapturedStep) -> int:
    replicas = step.strategy.num_replicas_in_sync
    total = 0
    for leaf in step.arguments.leaves:
        if leaf.shape is not None:
            size = math.prod(leaf.shape) * jax.numpy.dtype(leaf.dtype).itemsize
            total += size // replicas if leaf.split else size
    return total


def _bytes(variable: Any) -> int:
    """Of one copy or component, which is what a device has."""
    return math.prod(variable.shape) * jax.numpy.dtype(variable.dtype).itemsize
