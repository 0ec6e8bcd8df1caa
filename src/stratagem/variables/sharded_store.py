"""Store of shards on the replicas' devices, in device memory or in pinned host memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from stratagem.devices.lockstep import compute_on_every_process, is_multi_process, replicate_to_all
from stratagem.devices.mesh import Topology
from stratagem.devices.shards import put_shards, same_shards
from stratagem.variables.layouts import Division
from stratagem.variables.row_exchange import exchanged_rows
from stratagem.variables.single_device_store import take_rows

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
