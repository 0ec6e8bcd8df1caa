"""Programs of a step on given devices, and the sizes of its variables there."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Generator, Iterable
from typing import Any, Protocol

import jax

from stratagem.devices.mesh import Topology
from stratagem.execution.programs.lockstep import program_of
from stratagem.execution.programs.step_capture import CapturedStep
from stratagem.execution.programs.step_program import StepProgram
from stratagem.execution.tracing.trace import Trace
from stratagem.variables.kind import VariableKind
from stratagem.variables.layouts import stored_sharding
from stratagem.variables.registry import home_of
from stratagem.variables.sharded_store import ShardedStore
from stratagem.variables.store import Store, store_of


@contextlib.contextmanager
def step_programs(
    step: CapturedStep, topology: Topology, *, is_retraced: bool = True
) -> Generator[list[StepProgram]]:
    """Yields the programs of a step in execution order; lower them inside the context.

    `topology` has as many devices as the step was traced for. With `is_retraced`, traces the step
    again, since these are different devices.
    """
    with _moved_to(variables_of(step.trace), topology):
        # A trace is specific to its kind of devices.
        trace = step.retrace(step.arguments, topology) if is_retraced else step.trace
        yield program_of(trace, topology, "step").programs(step.arguments)


@contextlib.contextmanager
def _moved_to(variables: Iterable[Any], topology: Topology) -> Generator[None]:
    """Temporarily moves sharded variables to another topology."""
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
    """Returns the variables that a step uses, without duplicates."""
    tables = [lookup.table for lookup in trace.lookups]
    found = [*trace.written, *trace.read_only, *tables]
    return list({id(variable): variable for variable in found}.values())


def device_bytes(shape: jax.ShapeDtypeStruct) -> int:
    """Returns the bytes of one device's shard of an array."""
    part = shape.shape if shape.sharding is None else shape.sharding.shard_shape(shape.shape)
    return math.prod(part) * shape.dtype.itemsize


def is_held_by_host(store: Store | None) -> bool:
    """Returns True if a variable takes no device memory between steps."""
    return store is not None and (store.is_pinned or not store.is_on_replicas)


class VariableLike(Protocol):
    """A variable, of Keras or of a plan."""

    @property
    def shape(self) -> Any: ...  # noqa: D102

    @property
    def dtype(self) -> Any: ...  # noqa: D102


def held_bytes(variable: VariableLike, topology: Topology, store: Store | None = None) -> int:
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
