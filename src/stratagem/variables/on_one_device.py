"""Variables of which there is one copy, on one device."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from stratagem.topology import Topology

__all__ = ["OnOneDevice", "take_rows"]


@dataclasses.dataclass(frozen=True)
class OnOneDevice:
    """Keeps one copy, which is sent to the replicas when they need it.

    Args:
        device: of this process.
    """

    device: jax.Device

    gives_rows = True
    is_with_replicas = False
    is_pinned = False

    def sharding(self, shape: tuple[int, ...]) -> jax.sharding.Sharding:
        """Returns the device, as a sharding."""
        return jax.sharding.SingleDeviceSharding(self.device)

    def step_sharding(self, shape: tuple[int, ...], topology: Topology) -> jax.sharding.Sharding:
        """Returns the sharding of copies."""
        return topology.replicated

    def brought(self, value: jax.Array) -> jax.Array:
        """Returns what is kept."""
        return value

    def put_back(self, value: jax.Array) -> jax.Array:
        """Returns the value."""
        return value

    def kept(self, value: Any) -> jax.Array:
        """Returns the value on the device."""
        is_copied = isinstance(value, jax.Array) and not isinstance(value, Tracer)
        if is_copied and len(value.devices()) > 1:
            value = value.addressable_data(0)
        return jax.device_put(value, self.device)

    def spread(self, kept: jax.Array, topology: Topology) -> jax.Array:
        """Returns a copy for each replica."""
        return topology.replicate(kept)

    def whole(self, kept: jax.Array) -> jax.Array:
        """Returns what is kept."""
        return kept

    def for_step(self, kept: jax.Array, topology: Topology) -> jax.Array:
        """Returns a copy for each replica."""
        return topology.replicate(kept)

    def for_update(self, value: Any) -> jax.Array:
        """Returns the value on the device."""
        return self.kept(value)

    def update_sharding(self) -> jax.sharding.Sharding:
        """Returns the device, as a sharding."""
        return jax.sharding.SingleDeviceSharding(self.device)

    def rows(self, kept: jax.Array, ids: Any, topology: Topology) -> jax.Array:
        """Returns rows for each replica; only these leave the device."""
        rows = take_rows(kept, jax.device_put(ids, self.device))
        return topology.put_stacked(rows) if topology.num_replicas > 1 else topology.replicate(rows)


@jax.jit
def take_rows(table: jax.Array, ids: jax.Array) -> jax.Array:
    """Returns rows of a table.

    Args:
        table: of shape (n, ...).
        ids: integers of any shape.
    """
    return jnp.take(table, ids, axis=0)
