"""Assignments to rows of a variable, and assignments outside of steps.

Outside of steps, each process assigns to its own copy. So the group compares what they assign; see
`group/assignments.py`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import threading
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.core import Tracer

from stratagem.devices.lockstep import is_multi_process, runs_separately, wait_until_ready
from stratagem.devices.shards import assemble_on_host
from stratagem.errors import explain
from stratagem.execution.replica_context import ReplicaContext
from stratagem.group.current import current_group
from stratagem.options import ReduceOp, VariableAggregation
from stratagem.variables.components import initial_digest
from stratagem.variables.distributed import IndexedSlices, PerReplica, without_mirrored
from stratagem.variables.registry import Home, VariableKind, home_of
from stratagem.variables.sharded_variable import changed_rows, sets_rows

_LIBRARIES = tuple(
    os.path.dirname(file) + os.sep
    for file in (str(Path(__file__).parents[1]), str(keras.__file__), str(jax.__file__))
)
_NAME_OF_SEEDS = "seed_generator_state"  # the state of a `keras.random.SeedGenerator`
_STANDARD_FILES = (contextlib.__file__, functools.__file__, threading.__file__)


def note_assignment(variable: Any, home: Home, value: object) -> None:
    """Notes the value that a variable gets now, before it is stored.

    An assignment before the processes agree on initial values is one of these: all take that of
    process 0.
    """
    group = current_group()
    if group is None or isinstance(value, Tracer):
        return
    value = _own_copy(value)
    if variable.agreed_number is None:
        if value is not None and variable.has_value:  # not the initial value itself
            variable.initial_digest = initial_digest(value, home.strategy.topology)
        return
    # A metric's sum has a part of each process, a seed may be drawn from by one alone, and members
    # of an elastic group that join have assigned nothing before.
    is_sum = home.aggregation in (VariableAggregation.SUM, VariableAggregation.NONE)
    is_part = home.kind is VariableKind.ON_READ and is_sum
    if is_part or variable.name == _NAME_OF_SEEDS or runs_separately():
        return
    number, notes = variable.agreed_number, group.assignments
    before = None if number in notes else _digest(_value_before(variable, home))
    digest = _digest(value) or 0
    notes.add(number, variable.path, before=before, digest=digest, place=_place())


def _own_copy(value: object) -> Any:
    """Returns a value in the memory of this process; None if other processes have parts of it."""
    if not is_multi_process(value):
        return value
    array: Any = value
    return array.addressable_data(0) if array.is_fully_replicated else None


def _value_before(variable: Any, home: Home) -> Any:
    stored = variable.stored
    if home.kind is VariableKind.ON_READ or not isinstance(stored, jax.Array):
        return None
    if is_multi_process(stored):
        wait_until_ready(stored)  # names a lost process, where JAX would wait forever
        own = _own_copy(stored)
        return None if stored.is_deleted() else own
    return None if stored.is_deleted() else assemble_on_host(stored)


def _digest(value: Any) -> int | None:
    """Returns a checksum of a value; None for None."""
    if value is None:
        return None
    if isinstance(value, jax.Array) and next(iter(value.devices())).platform != "cpu":
        return int(_digest_on_device(value))
    return zlib.crc32(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)


@jax.jit
def _digest_on_device(value: jax.Array) -> jax.Array:
    # Not read by the host: a model's weights would take seconds.
    if jnp.issubdtype(value.dtype, jnp.complexfloating):
        value = jnp.stack([value.real, value.imag])
    bits = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}[value.dtype.itemsize]
    number = value.astype(jnp.uint8) if value.dtype == jnp.bool_ else value
    words = jax.lax.bitcast_convert_type(number, bits).ravel().astype(jnp.uint32)
    # Mixed with their places as in MurmurHash3, so that no sums of changes cancel out.
    words += jnp.arange(words.size, dtype=jnp.uint32) * jnp.uint32(0x9E3779B9)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        words = (words ^ (words >> shift)) * jnp.uint32(factor)
    return jnp.sum(words ^ (words >> 16), dtype=jnp.uint32)


def _place() -> str:
    """Returns the line of the user's program that assigns, and the callback that it called."""
    frame, callback = inspect.currentframe(), ""
    assert frame is not None
    while frame.f_back is not None:
        code = frame.f_code
        file = code.co_filename
        if not file.startswith(_LIBRARIES) and file not in _STANDARD_FILES:
            break
        if code.co_name.startswith("on_") and "CallbackList" not in code.co_qualname:
            callback = f" (in {code.co_qualname})"
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}{callback}"


class RowUpdates:
    """Scatter updates of a strategy's variable.

    In a replica function the rows of all replicas are aggregated by the variable's aggregation and
    then applied; in cross-replica and update context they are applied directly. Rows with the same
    index are added up, except by `scatter_min`, `scatter_max` and `scatter_update`.

    Source: TF 2.21 values.py, DistributedVariable.scatter_add and the like.
    """

    if TYPE_CHECKING:
        path: str

        def aggregating_context(self) -> ReplicaContext | None:
            """Returns the context in which rows are aggregated over replicas, or None."""
            ...

    def _scatter(self, method: str, sparse_delta: object) -> Any:
        context = self.aggregating_context()
        _check(self, method, is_aggregated=context is not None)
        slices = _plain(self, method, sparse_delta)
        slices.check()
        if context is not None:
            slices = _aggregate(_home(self).aggregation, slices, context)
        return self.change_rows(method, slices)

    def change_rows(self, method: str, slices: IndexedSlices) -> Any:
        """Applies a scatter method to rows without aggregation and returns the new value."""
        variable: Any = self
        return variable.assign_own(changed_rows(method, variable.own_value(), slices))


def _home(variable: object) -> Home:
    home = home_of(variable)
    assert home is not None  # only variables of strategies have these methods
    return home


def _aggregate(
    aggregation: VariableAggregation, slices: IndexedSlices, context: ReplicaContext
) -> IndexedSlices:
    """Returns the rows of all replicas combined, in a replica function."""
    if aggregation is VariableAggregation.NONE:
        return slices
    if aggregation is not VariableAggregation.ONLY_FIRST_REPLICA:
        op = ReduceOp.from_variable_aggregation(aggregation)
        return context.communicator.all_reduce_slices(op, slices)
    gathered = context.communicator.all_reduce_slices(ReduceOp.SUM, slices)
    owner = jnp.full(jnp.shape(slices.indices), context.replica_id_in_sync_group)
    owners = context.communicator.all_gather(owner, 0, None)
    nowhere = jnp.iinfo(gathered.indices.dtype).max
    indices = jnp.where(owners == 0, gathered.indices, nowhere)
    return IndexedSlices(gathered.values, indices, slices.dense_shape)


def _plain(variable: RowUpdates, method: str, value: object) -> IndexedSlices:
    """Returns the rows of a distributed value as one `IndexedSlices`, where that is allowed."""
    slices = without_mirrored(value)
    if not isinstance(slices, IndexedSlices):
        raise TypeError(
            explain(
                f"{method} of {variable.path!r} received a value of type {type(slices).__name__}.",
                expected="sg.IndexedSlices.",
                fix="write sg.IndexedSlices(values, indices).",
            )
        )
    if not isinstance(slices.values, PerReplica):
        return slices
    home = _home(variable)
    can_aggregate = home.aggregation in (VariableAggregation.SUM, VariableAggregation.MEAN)
    if slices.values.local is not None or not can_aggregate:
        raise TypeError(
            explain(
                f"{method} of {variable.path!r}, whose aggregation is {home.aggregation.name}, "
                "received rows that differ between replicas.",
                expected="the same rows for every copy.",
                fix="reduce them first: strategy.reduce(op, slices, axis=None).",
            )
        )
    op = ReduceOp.from_variable_aggregation(home.aggregation)
    return home.strategy.reduce(op, slices, axis=None)


def _check(variable: RowUpdates, method: str, *, is_aggregated: bool) -> None:
    home = _home(variable)
    if home.kind is VariableKind.ON_READ:
        raise NotImplementedError(
            explain(
                f"{method} was called on {variable.path!r}, an ON_READ variable.",
                expected="an ON_WRITE variable.",
                fix="leave `synchronization` out when you create it, or assign the whole value.",
            )
        )
    has_sum = home.aggregation in (VariableAggregation.SUM, VariableAggregation.MEAN)
    if sets_rows(method) and has_sum and is_aggregated:
        raise NotImplementedError(
            explain(
                f"{method} was called in a replica function on {variable.path!r}, whose "
                f"aggregation is {home.aggregation.name}.",
                expected="aggregation NONE or ONLY_FIRST_REPLICA: minima, maxima and new values "
                "of replicas have no sum.",
                fix="use scatter_add, or merge_call and extended.update with the same rows for "
                "every copy.",
            )
        )
