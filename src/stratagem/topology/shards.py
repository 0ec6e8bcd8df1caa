"""Transfer and reading of arrays that are sharded over the devices of a replica."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import Sharding

from stratagem.topology.lockstep import compute_on_every_process
from stratagem.topology.mesh import Topology

__all__ = [
    "assemble_on_host",
    "creating_on_host",
    "local_copy",
    "local_shards",
    "put_local_shards",
    "put_shards",
    "replica_copy",
    "replicas_span_processes",
]


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


def replicas_span_processes(topology: Topology) -> bool:
    """Returns True if each replica has devices of several processes."""
    return topology.spans_processes and len(topology.processes_of_inputs[0]) > 1


def replica_copy(array: jax.Array, topology: Topology, replica_id: int) -> jax.Array:
    """Returns the whole value of a local replica, on its first device of this process.

    `array` is replicated, has one component per replica, or is sharded within replicas. If the
    replica spans processes, all processes must ask for a sharded value together.
    """
    devices = topology.devices_of(replica_id)
    if array.is_fully_replicated or len(devices) < 2 or _is_whole(array, devices):
        own = topology.local_devices
        first = None if own is None else own[topology.local_replica_ids.index(replica_id)]
        (part,) = [shard.data for shard in array.addressable_shards if shard.device == first]
        return part
    if replicas_span_processes(topology):
        return compute_on_every_process(array)
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


def local_shards(array: jax.Array) -> np.ndarray[Any, Any]:
    """Returns this process's shards on the host, of shape (number of local devices, ...)."""
    shards = {shard.device: shard.data for shard in array.addressable_shards}
    return np.stack([np.asarray(shards[one]) for one in _local_devices(array.sharding)])


def put_local_shards(
    shards: np.ndarray[Any, Any], shape: tuple[int, ...], sharding: Sharding
) -> jax.Array:
    """Returns the array of a global shape from each process's `local_shards`."""
    devices = _local_devices(sharding)
    placed = [jax.device_put(shard, one) for shard, one in zip(shards, devices, strict=True)]
    return jax.make_array_from_single_device_arrays(shape, sharding, placed)


def _local_devices(sharding: Sharding) -> list[jax.Device]:
    return sorted(sharding.addressable_devices, key=lambda device: device.id)


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
    indices = array.sharding.devices_indices_map(array.shape)
    return len({str(indices[device]) for device in devices}) == 1


def _assemble(array: jax.Array, devices: object) -> np.ndarray[Any, Any]:
    """Assembles the shards on some devices."""
    if array.is_fully_replicated:
        return np.asarray(array.addressable_data(0))
    whole = np.empty(array.shape, array.dtype)
    for shard in array.addressable_shards:
        if shard.device in devices:
            whole[shard.index] = np.asarray(shard.data)
    return whole
