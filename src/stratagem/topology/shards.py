"""Transfer and reading of arrays that are sharded over the devices of a replica."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import Sharding

from stratagem.topology.mesh import Topology

__all__ = ["assemble_on_host", "creating_on_host", "local_copy", "put_shards", "replica_copy"]


def put_shards(value: object, sharding: Sharding) -> jax.Array:
    """Puts an array, the same on all processes, on devices by shards, never whole on a device."""
    if isinstance(value, Tracer):
        return jax.lax.with_sharding_constraint(value, sharding)
    if isinstance(value, jax.Array):
        if value.sharding == sharding:
            return value
        value = assemble_on_host(value)
    host = np.asarray(value)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def replica_copy(array: jax.Array, topology: Topology, replica_id: int) -> jax.Array:
    """Returns the whole value of a local replica, on its first device.

    `array` is replicated, has one component per replica, or is sharded within replicas.
    """
    devices = topology.devices_of(replica_id)
    if array.is_fully_replicated or len(devices) < 2 or _is_whole(array, devices):
        first = devices[0] if devices else None
        (part,) = [shard.data for shard in array.addressable_shards if shard.device == first]
        return part
    return jax.device_put(_assemble(array, set(devices)), devices[0])


def local_copy(array: object, topology: Topology) -> Any:
    """Returns a local copy on one device, assembled from shards if necessary."""
    if not isinstance(array, jax.Array) or isinstance(array, Tracer):
        return jax.numpy.asarray(array)
    if array.is_fully_replicated:
        return array.addressable_data(0)
    return replica_copy(array, topology, topology.local_replica_ids[0])


def assemble_on_host(array: object) -> np.ndarray[Any, Any]:
    """Returns the value of the local shards, assembled on the host."""
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        return _assemble(array, array.sharding.addressable_devices)
    return np.asarray(array)


@contextlib.contextmanager
def creating_on_host(is_large: bool) -> Generator[None]:
    """Creates arrays on the host within the block if `is_large`, to be sent in shards."""
    try:
        host = jax.local_devices(backend="cpu")[0] if is_large else None
    except RuntimeError:  # JAX is configured without the CPU platform
        host = None
    if host is None:
        yield
    else:
        with jax.default_device(host):
            yield


def _is_whole(array: jax.Array, devices: tuple[jax.Device, ...]) -> bool:
    """Returns True if every device of a replica has the whole value."""
    indices = {str(s.index) for s in array.addressable_shards if s.device in devices}
    return len(indices) == 1


def _assemble(array: jax.Array, devices: object) -> np.ndarray[Any, Any]:
    """Assembles the shards on some devices."""
    if array.is_fully_replicated:
        return np.asarray(array.addressable_data(0))
    whole = np.empty(array.shape, array.dtype)
    for shard in array.addressable_shards:
        if shard.device in devices:
            whole[shard.index] = np.asarray(shard.data)
    return whole
