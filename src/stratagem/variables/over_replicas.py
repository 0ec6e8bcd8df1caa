"""Variables of which each replica's device has a part, in its own memory or in the host's."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from stratagem.topology import REPLICA_AXIS, Topology
from stratagem.topology.lockstep import copied_to_all, is_of_several, on_every_process
from stratagem.topology.pieces import put_in_pieces
from stratagem.variables.keeping import Keeping
from stratagem.variables.on_one_device import take_rows

__all__ = ["OverReplicas", "PartedState", "is_worth_parts"]

# Of a smaller variable the exchange takes more time than its copies take memory.
_MIN_PARTED_SIZE = 1024


@dataclasses.dataclass(frozen=True)
class OverReplicas:
    """Keeps a part of a value on each replica's device.

    It is parted along the first axis whose size the number of replicas divides; where there is none
    each device has the whole.

    Args:
        topology: the devices of the replicas. Where they are of several processes, all of these
            have to ask for the whole of a value.
        gives_rows: whether replicas exchange the rows of tables that they look up, and not tables.
        memory_kind: JAX's name of the memory that parts are in, each in that of its device; None
            for that in which the device computes.
    """

    topology: Topology
    gives_rows: bool = True
    memory_kind: str | None = None

    is_with_replicas = True

    def parted_axis(self, shape: tuple[int, ...]) -> int | None:
        """Returns the axis along which a value is parted; None for none.

        Args:
            shape: of the value.
        """
        count = self.topology.num_replicas
        axes = (axis for axis, size in enumerate(shape) if size and size % count == 0)
        return next(axes, None)

    @property
    def is_pinned(self) -> bool:
        """Whether parts are in pinned memory of the host, from where devices bring them over."""
        return self.memory_kind is not None

    def sharding(self, shape: tuple[int, ...]) -> NamedSharding:
        """Returns where each part is."""
        computing = self.computing_sharding(shape)
        if self.memory_kind is None:
            return computing
        return NamedSharding(computing.mesh, computing.spec, memory_kind=self.memory_kind)

    def computing_sharding(self, shape: tuple[int, ...]) -> NamedSharding:
        """Returns where each part is while its device computes with it.

        Args:
            shape: of the value.
        """
        axis = self.parted_axis(shape)
        if axis is None:
            return self.topology.replicated
        return NamedSharding(self.topology.mesh, PartitionSpec(*[None] * axis, REPLICA_AXIS))

    def step_sharding(self, shape: tuple[int, ...], topology: Topology) -> jax.sharding.Sharding:
        """Returns where each part is."""
        return self.computing_sharding(shape)

    def brought(self, value: jax.Array) -> jax.Array:
        """Returns the parts in the memory in which devices compute."""
        if self.memory_kind is None:
            return value
        value = jax.device_put(value, jax.memory.Space.Device)
        # Else a compiler may gather the parts where they were, and each device brings the whole.
        return jax.lax.with_sharding_constraint(value, self.computing_sharding(value.shape))

    def put_back(self, value: jax.Array) -> jax.Array:
        """Returns a new value in parts, of which each device computes its own."""
        value = jax.lax.with_sharding_constraint(value, self.computing_sharding(value.shape))
        return value if self.memory_kind is None else jax.device_put(value, jax.memory.Space.Host)

    def kept(self, value: Any) -> jax.Array:
        """Returns the value in parts; what is on one device goes there by the host."""
        sharding = self.sharding(np.shape(value))
        is_array = isinstance(value, jax.Array) and not isinstance(value, Tracer)
        is_on_several = is_array and len(value.devices()) > 1
        if is_on_several and not self.topology.spans_processes:
            return jax.device_put(value, sharding)
        # JAX would cut a value on the host into parts on its default device, which holds all then.
        return put_in_pieces(value, sharding)

    def spread(self, kept: jax.Array, topology: Topology) -> jax.Array:
        """Returns a copy for each replica."""
        return copied_to_all(kept) if is_of_several(kept) else topology.replicate(kept)

    def whole(self, kept: jax.Array) -> jax.Array:
        """Returns the value on the first replica's device, of this process."""
        if is_of_several(kept):
            return kept.addressable_data(0) if kept.is_fully_replicated else on_every_process(kept)
        return jax.device_put(self.brought(kept), next(iter(self.topology.devices or ())))

    def own_parts(self, kept: jax.Array) -> np.ndarray[Any, Any]:
        """Returns the parts that this process has, on the host.

        Args:
            kept: what `kept` returned.

        Returns:
            Array of shape (num_local_replicas, ...).
        """
        axis = self.parted_axis(kept.shape) or 0
        parts = sorted(kept.addressable_shards, key=lambda part: part.index[axis].start or 0)
        return np.stack([np.asarray(part.data) for part in parts])

    def of_own_parts(self, parts: np.ndarray[Any, Any], shape: tuple[int, ...]) -> jax.Array:
        """Returns the value of which each process gives the parts that it has.

        Args:
            parts: what `own_parts` returned.
            shape: of the whole value.
        """
        devices = self.topology.local_devices or ()
        placed = [jax.device_put(part, one) for part, one in zip(parts, devices, strict=True)]
        sharding = self.sharding(shape)
        return jax.make_array_from_single_device_arrays(shape, sharding, placed)

    def for_step(self, kept: jax.Array, topology: Topology) -> jax.Array:
        """Returns the parts: the step itself gathers them, when it needs them."""
        return self.brought(kept)

    def for_update(self, value: Any) -> jax.Array:
        """Returns a copy on each device, of which what is needed is taken."""
        return self.topology.replicate(value)

    def update_sharding(self) -> jax.sharding.Sharding:
        """Returns the sharding of copies."""
        return self.topology.replicated

    def rows(self, kept: jax.Array, ids: Any, topology: Topology) -> jax.Array:
        """Returns rows for each replica, from whichever devices have them."""
        if topology.num_replicas > 1 and self.parted_axis(kept.shape) == 0:
            return _exchanged_rows(topology, kept, ids)
        sharding = topology.stacked if topology.num_replicas > 1 else topology.replicated
        return jax.jit(take_rows, out_shardings=sharding)(kept, ids)


@dataclasses.dataclass(frozen=True)
class PartedState:
    """Keeps what an optimizer keeps in parts, or all of a model's state.

    Args:
        keeping: in parts.
        is_all: whether variables of the model are in parts, too.
    """

    keeping: OverReplicas
    is_all: bool

    def choose(self, variable: Any, slot_of: Any) -> Keeping | None:
        """Returns the parts, for what is large enough."""
        shape = tuple(variable.shape)
        is_wanted = self.is_all or slot_of is not None
        can_part = self.keeping.parted_axis(shape) is not None
        return self.keeping if is_wanted and is_worth_parts(shape) and can_part else None

    def check(self) -> None:
        """Does nothing."""


def is_worth_parts(shape: Sequence[int]) -> bool:
    """Tells whether a variable is so large that it is kept elsewhere than as copies on devices.

    Args:
        shape: of the variable.
    """
    return math.prod(shape) >= _MIN_PARTED_SIZE


@functools.partial(jax.jit, static_argnums=0)
def _exchanged_rows(topology: Topology, table: jax.Array, ids: jax.Array) -> jax.Array:
    """Rows of a table that is parted by rows: each device sends those that it has."""
    num_rows = table.shape[0]

    def exchange(part: jax.Array, ids: jax.Array) -> jax.Array:
        ids = jnp.where(ids < 0, ids + num_rows, ids)
        own_ids = jax.lax.all_gather(ids[0], REPLICA_AXIS)
        own_ids -= (jax.lax.axis_index(REPLICA_AXIS) * len(part)).astype(ids.dtype)
        has = (own_ids >= 0) & (own_ids < len(part))
        rows = jnp.take(part, own_ids, axis=0, mode="clip")
        rows = jnp.where(_over(has, rows), rows, jnp.zeros((), rows.dtype))
        rows = jax.lax.psum_scatter(rows, REPLICA_AXIS)[None]
        is_row = _over((ids >= 0) & (ids < num_rows), rows)
        nothing = jnp.take(rows.reshape(-1)[:1], jnp.array([1]))[0]  # as JAX fills it in
        return jnp.where(is_row, rows, nothing)

    by_rows, stacked = PartitionSpec(REPLICA_AXIS), PartitionSpec(REPLICA_AXIS)
    return jax.shard_map(
        exchange,
        mesh=topology.mesh,
        in_specs=(by_rows, stacked),
        out_specs=stacked,
        check_vma=False,
    )(table, ids)


def _over(flags: jax.Array, rows: jax.Array) -> jax.Array:
    """Flags of rows, one for each of their elements."""
    return flags.reshape(*flags.shape, *[1] * (rows.ndim - flags.ndim))
