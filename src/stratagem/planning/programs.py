"""The programs that a step is made of on the devices it is compiled for."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Generator, Iterable
from typing import Any

import jax

from stratagem.execution import program_of
from stratagem.execution.programs.step_capture import CapturedStep
from stratagem.execution.programs.step_program import StepProgram
from stratagem.execution.tracing.trace import Trace
from stratagem.topology import Topology
from stratagem.variables import (
    ShardedStore,
    Store,
    VariableKind,
    home_of,
    store_of,
    stored_sharding,
)

__all__ = [
    "device_bytes",
    "held_bytes",
    "is_held_by_host",
    "step_programs",
    "variables_of",
]


@contextlib.contextmanager
def step_programs(
    step: CapturedStep, topology: Topology, *, is_other: bool = True
) -> Generator[list[StepProgram]]:
    """Gives all programs of one step for some devices; they are to be lowered before it ends.

    Args:
        step: the training step.
        topology: the devices, as many as those that the step was traced for.
        is_other: whether these are other devices, for which the step is traced anew.

    Yields:
        The programs, in the order in which they run.
    """
    with _kept_on(variables_of(step.trace), topology):
        # A trace names the kind of its devices.
        trace = step.retrace(step.arguments, topology) if is_other else step.trace
        yield program_of(trace, topology, "step").programs(step.arguments)


@contextlib.contextmanager
def _kept_on(variables: Iterable[Any], topology: Topology) -> Generator[None]:
    """Lets variables that are kept in parts be so on other devices, for a while."""
    moved: list[tuple[Any, Any]] = []
    try:
        for variable in variables:
            store = store_of(variable)
            if isinstance(store, ShardedStore):
                moved.append((variable, store))
                variable.store = dataclasses.replace(store, topology=topology)
        yield
    finally:
        for variable, store in moved:
            variable.store = store


def variables_of(trace: Trace) -> list[Any]:
    """Returns the variables that a step uses, each once.

    Args:
        trace: of the step.
    """
    tables = [lookup.table for lookup in trace.lookups]
    found = [*trace.written, *trace.read_only, *tables]
    return list({id(variable): variable for variable in found}.values())


def device_bytes(shape: jax.ShapeDtypeStruct) -> int:
    """Returns the size of the part of an array that one device has.

    Args:
        shape: of the whole array, with its sharding.
    """
    part = shape.shape if shape.sharding is None else shape.sharding.shard_shape(shape.shape)
    return math.prod(part) * shape.dtype.itemsize


def is_held_by_host(store: Store | None) -> bool:
    """Tells whether a variable is no part of a device's memory between steps.

    Args:
        store: how it is kept; None for copies on the devices.
    """
    return store is not None and (store.is_pinned or not store.is_on_replicas)


def held_bytes(variable: Any, topology: Topology, store: Any = None) -> int:
    """Returns what one device holds of a variable between steps.

    Args:
        variable: of any strategy or none.
        topology: the devices of its replicas.
        store: how it is kept; None for copies.
    """
    shape = tuple(variable.shape)
    home = home_of(variable)
    if is_held_by_host(store):
        return 0
    if store is not None:
        shape = store.sharding(shape).shard_shape(shape)
    elif home is not None and home.kind is not VariableKind.ON_READ:  # of that one its component
        shape = stored_sharding(variable, topology).shard_shape(shape)
    return math.prod(shape) * jax.numpy.dtype(variable.dtype).itemsize
