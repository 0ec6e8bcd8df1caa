"""Placement chooses the store of each variable; stores of one device, and of shards."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from stratagem.devices.lockstep import compute_on_every_process, is_multi_process, replicate_to_all
from stratagem.devices.mesh import Topology
from stratagem.devices.shards import put_shards, same_shards
from stratagem.variables.layouts import Division, Store, VariableLayouts

# Exchange of rows between the shards of a table and the replicas that look them up.

# Smaller exchanges are one message.
_MIN_BLOCK_BYTES = 2**26


@functools.partial(jax.jit, static_argnums=0)
def exchanged_rows(topology: Topology, table: jax.Array, ids: jax.Array) -> jax.Array:
    """Returns rows of a table sharded by rows: each device sends the rows it stores.

    `ids` have the replicas on axis 0. A device needs temporary memory for its own rows, and once
    more for as many, or for its shard if that is larger.
    """
    num_rows = table.shape[0]

    def exchange(shard: jax.Array, ids: jax.Array) -> jax.Array:
        ids = jnp.where(ids < 0, ids + num_rows, ids)
        rows = _rows_in_blocks(shard, ids.reshape(-1), topology)
        rows = rows.reshape(*ids.shape, *table.shape[1:])
        is_row = _over((ids >= 0) & (ids < num_rows), rows)
        fill_value = jnp.take(rows.reshape(-1)[:1], jnp.array([1]))[0]  # Fill value of jnp.take.
        return jnp.where(is_row, rows, fill_value)

    by_rows, stacked = PartitionSpec(topology.shard_axis), PartitionSpec(topology.replica_axis)
    return jax.shard_map(
        exchange,
        mesh=topology.mesh,
        in_specs=(by_rows, stacked),
        out_specs=stacked,
        check_vma=False,
    )(table, ids)


def _rows_in_blocks(shard: jax.Array, ids: jax.Array, topology: Topology) -> jax.Array:
    """Returns this device's rows, in as many messages as keep the rows of all devices small."""
    count = len(ids)
    min_rows = _MIN_BLOCK_BYTES // max(1, math.prod(shard.shape[1:]) * shard.dtype.itemsize)
    size = max(1, max(count, len(shard), min_rows) // topology.num_shards)
    if size >= count:
        return _rows(shard, ids, topology.shard_axis)

    def with_block(block: jax.Array, rows: jax.Array) -> jax.Array:
        first = jnp.minimum(block * size, count - size)  # the last block overlaps the one before
        own_ids = jax.lax.dynamic_slice_in_dim(ids, first, size)
        return jax.lax.dynamic_update_slice_in_dim(
            rows, _rows(shard, own_ids, topology.shard_axis), first, 0
        )

    rows = jnp.zeros((count, *shard.shape[1:]), shard.dtype)
    return jax.lax.fori_loop(0, -(-count // size), with_block, rows)


def _rows(shard: jax.Array, ids: jax.Array, axis: str) -> jax.Array:
    """Returns this device's rows; a row outside the table is zero."""
    local_ids = jax.lax.all_gather(ids, axis)
    local_ids -= (jax.lax.axis_index(axis) * len(shard)).astype(ids.dtype)
    is_here = (local_ids >= 0) & (local_ids < len(shard))
    rows = jnp.take(shard, local_ids, axis=0, mode="clip")
    rows = jnp.where(_over(is_here, rows), rows, jnp.zeros((), rows.dtype))
    return jax.lax.psum_scatter(rows, axis)


def _over(flags: jax.Array, rows: jax.Array) -> jax.Array:
    """Returns row flags in a shape that broadcasts over the rows' elements."""
    return flags.reshape(*flags.shape, *[1] * (rows.ndim - flags.ndim))


# Store of one copy, on one device: central storage.


@dataclasses.dataclass(frozen=True)
class SingleDeviceStore:
    """One copy on a device of this process, copied to replicas when needed. See `Store`."""

    device: jax.Device

    serves_rows = True
    is_on_replicas = False
    is_pinned = False

    def sharding(self, shape: tuple[int, ...]) -> jax.sharding.Sharding:
        """Returns the device, as a sharding."""
        return jax.sharding.SingleDeviceSharding(self.device)

    def step_sharding(self, shape: tuple[int, ...], topology: Topology) -> jax.sharding.Sharding:
        """Returns the sharding of copies."""
        return topology.replicated

    def put(self, value: Any) -> jax.Array:
        """Moves a value to the device."""
        is_array = isinstance(value, jax.Array) and not isinstance(value, Tracer)
        if is_array and len(value.devices()) > 1:
            value = value.addressable_data(0)
        return jax.device_put(value, self.device)

    def gather(self, stored: jax.Array) -> jax.Array:
        """Returns the stored value."""
        return stored

    def replicate(self, stored: jax.Array, topology: Topology) -> jax.Array:
        """Copies the value to each replica."""
        return topology.replicate(stored)

    def load(self, stored: jax.Array) -> jax.Array:
        """Returns the stored value: the device computes where it stores."""
        return stored

    def unload(self, value: jax.Array) -> jax.Array:
        """Returns the value: the device stores where it computes."""
        return value

    def for_step(self, stored: jax.Array, topology: Topology) -> jax.Array:
        """Copies the value to each replica."""
        return topology.replicate(stored)

    def for_update(self, value: jax.Array) -> jax.Array:
        """Moves a value to the device."""
        return self.put(value)

    def update_sharding(self) -> jax.sharding.Sharding:
        """Returns the device, as a sharding."""
        return jax.sharding.SingleDeviceSharding(self.device)

    def rows(self, loaded: jax.Array, ids: jax.Array | np.ndarray, topology: Topology) -> jax.Array:
        """Looks up rows on the device, so that only these are transferred."""
        rows = take_rows(loaded, jax.device_put(ids, self.device))
        return topology.put_stacked(rows) if topology.num_replicas > 1 else topology.replicate(rows)


@jax.jit
def take_rows(table: jax.Array, ids: jax.Array) -> jax.Array:
    """Returns rows of a table of shape (n, ...) for integers of any shape."""
    return jnp.take(table, ids, axis=0)


# For smaller variables, the exchange costs more than the memory it saves.
_MIN_SHARDED_SIZE = 1024


@dataclasses.dataclass(frozen=True)
class ShardedStore:
    """A shard of each value on each replica's device. See `Store`.

    Shards the first axis whose size is a multiple of the number of shards; replicates a value
    without one. If the devices belong to several processes, all must ask for a whole value
    together. `serves_rows` exchanges only the table rows that replicas look up. `memory_kind` is
    JAX's name of the memory of the shards, such as "pinned_host"; None for device memory.
    `division` shards values over the devices of each replica as well.
    """

    topology: Topology
    serves_rows: bool = True
    memory_kind: str | None = None
    division: Division | None = None

    is_on_replicas = True

    @property
    def is_pinned(self) -> bool:
        """True if shards are in pinned host memory, which devices copy from within a step."""
        return self.memory_kind is not None

    def divided(self, division: Division | None) -> ShardedStore:
        """Returns a store that shards over the devices of each replica, too."""
        if division is None:
            return self
        return dataclasses.replace(self, division=division, serves_rows=False)

    def sharded_axis(self, shape: tuple[int, ...]) -> int | None:
        """Returns the axis that is sharded over replicas; None if no axis can be."""
        count, division = self.topology.num_shards, self.division
        if division is not None and division.replica_axis is not None:
            return division.replica_axis
        axes = (axis for axis, size in enumerate(shape) if size and size % count == 0)
        return next((axis for axis in axes if division is None or division.is_free(axis)), None)

    def sharding(self, shape: tuple[int, ...]) -> NamedSharding:
        """Returns the sharding of a stored value of this shape."""
        computing = self.compute_sharding(shape)
        if self.memory_kind is None:
            return computing
        return NamedSharding(computing.mesh, computing.spec, memory_kind=self.memory_kind)

    def compute_sharding(self, shape: tuple[int, ...]) -> NamedSharding:
        """Returns the sharding of a value while its devices compute with it."""
        axis = self.sharded_axis(shape)
        if self.division is not None:
            return NamedSharding(
                self.topology.mesh, self.division.spec(axis, self.topology.shard_axis)
            )
        if axis is None:
            return self.topology.replicated
        return NamedSharding(
            self.topology.mesh, PartitionSpec(*[None] * axis, self.topology.shard_axis)
        )

    def step_sharding(self, shape: tuple[int, ...], topology: Topology) -> jax.sharding.Sharding:
        """Returns the sharding of the result of `for_step`."""
        return self.compute_sharding(shape)

    def put(self, value: Any) -> jax.Array:
        """Shards a value; a value on one device is copied through the host."""
        sharding = self.sharding(np.shape(value))
        is_array = isinstance(value, jax.Array) and not isinstance(value, Tracer)
        is_on_several = is_array and len(value.devices()) > 1
        if is_on_several and not self.topology.spans_processes:
            return jax.device_put(value, sharding)
        # JAX would first copy all of a host value to its default device.
        return put_shards(value, sharding)

    def gather(self, stored: jax.Array) -> jax.Array:
        """Returns the whole value on the first replica's device of this process."""
        if is_multi_process(stored):
            is_copied = stored.is_fully_replicated
            return stored.addressable_data(0) if is_copied else compute_on_every_process(stored)
        loaded = same_shards(self.load(stored))
        return jax.device_put(loaded, next(iter(self.topology.devices or ())))

    def replicate(self, stored: jax.Array, topology: Topology) -> jax.Array:
        """Returns a copy on each replica's device."""
        return replicate_to_all(stored) if is_multi_process(stored) else topology.replicate(stored)

    def load(self, stored: jax.Array) -> jax.Array:
        """Moves shards to the memory that devices compute in. Works inside programs."""
        if self.memory_kind is None:
            return stored
        value = jax.device_put(stored, jax.memory.Space.Device)
        # Otherwise the compiler may gather in host memory, and each device copies the whole value.
        return jax.lax.with_sharding_constraint(value, self.compute_sharding(value.shape))

    def unload(self, value: jax.Array) -> jax.Array:
        """Shards a new value, so that each device computes and stores its own shard."""
        value = jax.lax.with_sharding_constraint(value, self.compute_sharding(value.shape))
        return value if self.memory_kind is None else jax.device_put(value, jax.memory.Space.Host)

    def for_step(self, stored: jax.Array, topology: Topology) -> jax.Array:
        """Returns the shards, which the step gathers where needed."""
        return self.load(stored)

    def for_update(self, value: jax.Array) -> jax.Array:
        """Returns a copy on each device, which reads the part it needs."""
        return self.topology.replicate(value)

    def update_sharding(self) -> jax.sharding.Sharding:
        """Returns the sharding of copies."""
        return self.topology.replicated

    def rows(self, loaded: jax.Array, ids: jax.Array | np.ndarray, topology: Topology) -> jax.Array:
        """Looks up rows for each replica on the devices that store them."""
        if topology.num_replicas > 1 and self.sharded_axis(loaded.shape) == 0:
            return exchanged_rows(topology, loaded, ids)
        sharding = topology.stacked if topology.num_replicas > 1 else topology.replicated
        return jax.jit(take_rows, out_shardings=sharding)(loaded, ids)


def is_worth_sharding(shape: Sequence[int]) -> bool:
    """Returns True if a variable of this shape is large enough to shard."""
    return math.prod(shape) >= _MIN_SHARDED_SIZE


class NewVariable(Protocol):
    """A variable of a strategy whose store is chosen, perhaps before it has a value."""

    @property
    def path(self) -> str:
        """The variable's path in its model."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole variable."""
        ...

    @property
    def is_large_table(self) -> bool:
        """True for a table of which a step looks up rows."""
        ...


@dataclasses.dataclass
class Replicated:
    """A copy of every variable on each replica's device, perhaps sharded by `layouts`.

    To write another placement, inherit from it and override `choose`.
    """

    layouts: VariableLayouts | None = None  # rules that shard a copy over logical devices

    uses_stores = False  # True if `choose` may return a store, so that steps must look for one
    is_remote = False  # True if all variables are stored outside this process
    allows_devices = False  # True if a `keras.device` block may choose the device of a variable
    remote: Any = None  # the `RemoteState` of variables outside this process

    def choose(self, variable: NewVariable, slot_of: object) -> Store | None:
        """Returns the store of a new variable; None for a copy on each replica's device.

        `variable` has a path, shape and dtype, but no value yet. `slot_of` is the trained variable
        if an optimizer creates a slot for it.
        """
        return None

    def check(self) -> None:
        """Raises ValueError for unused rules and the like. Called when training starts."""


class UniformPlacement(Replicated):
    """One store for all variables."""

    uses_stores = True

    def __init__(self, store: Store) -> None:
        super().__init__()
        self.store = store

    def choose(self, variable: NewVariable, slot_of: object) -> Store | None:
        """Returns the store."""
        return self.store


class ShardedState(Replicated):
    """Shards of optimizer state ("optimizer", ZeRO-1) or of all model state ("all", FSDP, ZeRO-3).

    A variable whose layout names the replicas is sharded in any case; with None, no other is.
    """

    uses_stores = True

    def __init__(
        self,
        store: ShardedStore,
        shard_state: str | None,
        layouts: VariableLayouts | None = None,
    ) -> None:
        super().__init__(layouts)
        self.store = store
        self.shard_state = shard_state

    def choose(self, variable: NewVariable, slot_of: object) -> Store | None:
        """Returns the store for a variable that is large enough and has an axis to shard."""
        shape = tuple(variable.shape)
        division: Division | None = getattr(variable, "division", None) or self._of_rest(variable)
        store = self.store.divided(division)
        if division is not None and division.replica_axis is not None:
            return store
        is_slot = self.shard_state == "optimizer" and slot_of is not None
        is_wanted = is_slot or self.shard_state == "all"
        can_shard = store.sharded_axis(shape) is not None
        return store if is_wanted and is_worth_sharding(shape) and can_shard else None

    def _of_rest(self, variable: NewVariable) -> Division | None:
        """Returns the division of a variable without a layout, if there are layouts and "all".

        It is sharded over the devices of each replica as well, along its last axis that leaves
        another one for the replicas.
        """
        shape, topology = tuple(variable.shape), self.store.topology
        parts, count = topology.num_logical_devices, topology.num_shards
        layouts = self.layouts if self.shard_state == "all" and parts > 1 else None
        if layouts is None or variable.is_large_table or layouts.covers(variable.path):
            return None
        for axis in reversed(range(len(shape))):
            others = (size for other, size in enumerate(shape) if other != axis)
            if shape[axis] % parts == 0 and any(size and size % count == 0 for size in others):
                names = topology.logical_axes
                return Division(tuple(names if i == axis else () for i in range(len(shape))))
        return None


def sole_device(placement: Replicated) -> jax.Device | None:
    """Returns the device that stores all variables; None if a placement has no such device."""
    if isinstance(placement, UniformPlacement) and isinstance(placement.store, SingleDeviceStore):
        return placement.store.device
    return None
