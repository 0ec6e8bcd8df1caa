"""Store of one copy, on one device: central storage."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from stratagem.devices.mesh import Topology

if TYPE_CHECKING:
    import numpy as np


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
