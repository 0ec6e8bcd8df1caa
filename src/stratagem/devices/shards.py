"""Transfer and reading of arrays that are sharded over the devices of a replica."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Iterable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Sharding, SingleDeviceSharding

from stratagem.devices.lockstep import compute_on_every_process
from stratagem.devices.mesh import Topology
from stratagem.environment import release_freed_memory
from stratagem.errors import explain

if TYPE_CHECKING:
    from jax.typing import DTypeLike

# Smaller values take little memory, and a call for each device takes longer than one for all.
MIN_SLICED_BYTES = 2**20
# Malloc keeps what whole arrays and old shards took, in pieces that do not fit the next ones.
_RELEASED_BYTES = 2**25

_sliced_bytes = 0


def put_shards(value: object, sharding: Sharding) -> jax.Array:
    """Puts an array, the same on all processes, on devices by shards, never whole on a device."""
    if isinstance(value, Tracer):
        return jax.lax.with_sharding_constraint(value, sharding)
    if isinstance(value, jax.Array):
        if value.sharding == sharding:
            return value
        value = assemble_on_host(value)
    host = np.asarray(value)
    if host.nbytes >= MIN_SLICED_BYTES:
        # JAX for CPU would use the array's memory for its slices, and so hold the whole.
        return put_slices(host, sharding, host.dtype)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def put_slices(value: Any, sharding: Sharding, dtype: DTypeLike) -> jax.Array:
    """Puts slices of an array on the host, or of an HDF5 dataset, on the devices that hold them.

    Each slice is read, cast and copied on its own.
    """
    indices = sharding.addressable_devices_indices_map(value.shape)
    placed = [
        copied_to_device(np.asarray(value[index]).astype(dtype, copy=False), device, sharding)
        for device, index in indices.items()
    ]
    _release_after(value.size * np.dtype(dtype).itemsize)
    return jax.make_array_from_single_device_arrays(value.shape, sharding, placed)


def _release_after(num_bytes: int) -> None:
    """Counts bytes that were sent in slices, and releases freed memory once they are many."""
    global _sliced_bytes
    _sliced_bytes += num_bytes
    if _sliced_bytes >= _RELEASED_BYTES:
        _sliced_bytes = 0
        release_freed_memory()


def copied_to_device(value: np.ndarray[Any, Any], device: Any, sharding: Sharding) -> jax.Array:
    """Copies a value to the memory of a sharding; the next step can donate the copy."""
    target = SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
    if device.platform != "cpu":
        return jax.device_put(value, target)
    with jax.default_device(device):  # `device_put` would use NumPy's memory, or never reuse it
        copy = jax.block_until_ready(jnp.array(value))
    is_there = sharding.memory_kind in (None, device.default_memory().kind)
    return copy if is_there else jax.device_put(copy, target)


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
        return jnp.asarray(array)
    if array.is_fully_replicated:
        return array.addressable_data(0)
    return replica_copy(array, topology, topology.local_replica_ids[0])


def assemble_on_host(array: object) -> np.ndarray[Any, Any]:
    """Returns the value of the local shards, assembled on the host."""
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        return _assemble(array, array.sharding.addressable_devices)
    return np.asarray(same_shards(array) if isinstance(array, jax.Array) else array)


def same_shards(array: jax.Array) -> jax.Array:
    """Returns another array of the same shards, to be read whole.

    JAX stores the whole on the host with the array that is read, for the next read.
    """
    if isinstance(array, Tracer) or array.is_fully_replicated or not array.is_fully_addressable:
        return array
    pieces = [shard.data for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, pieces)


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


# Check of 64-bit integers before JAX makes them 32-bit ones without a word.


# Letters of the dtypes of 64-bit integers: on some systems, there are two of each.
_WIDE = frozenset(np.dtype(kind).char for kind in ("int64", "uint64", "l", "L", "q", "Q"))
_OF_HOST = (np.ndarray, np.generic)


def require_exact_integers(
    arrays: Iterable[object], name_of: Callable[[int], str] | None = None
) -> None:
    """Raises OverflowError if JAX would change a value of an array of the host.

    Without `jax_enable_x64`, JAX keeps only the lower 32 bits of an integer: another row of a table
    would be read and trained. `name_of` returns the name of an array by its position.
    """
    for place, array in enumerate(arrays):
        # By the letter: that is faster than the kind and the size of the dtype.
        if isinstance(array, _OF_HOST) and array.dtype.char in _WIDE and not _is_exact(array):
            raise _changed_values(array, "An array" if name_of is None else name_of(place))


def _is_exact(array: Any) -> bool:
    kept = jax.dtypes.canonicalize_dtype(array.dtype)
    if kept == array.dtype or not array.size:
        return True
    lowest, highest = _limits(kept)
    return bool(array.min() >= lowest and array.max() <= highest)


@functools.cache
def _limits(dtype: np.dtype[Any]) -> tuple[int, int]:
    limits = np.iinfo(dtype)
    return int(limits.min), int(limits.max)


def _changed_values(array: Any, name: str) -> OverflowError:
    """Returns the error. It never contains the values: they may be ids of people."""
    kept = jax.dtypes.canonicalize_dtype(array.dtype)
    lowest, highest = _limits(kept)
    count = int(np.count_nonzero((array < lowest) | (array > highest)))
    return OverflowError(
        explain(
            f"{name} has dtype {array.dtype} and shape {array.shape}. {count} of its values do not "
            f"fit {kept}.",
            expected=f"values from {lowest} to {highest}: JAX keeps only the lower 32 bits of "
            "others.",
            fix="pass row numbers below 2**31, for example ids mapped by a vocabulary or a hash. "
            "Pass 64-bit keys as pairs of 32 bits, ids[..., None].view('uint32'). Cast numbers "
            "such as times to floats, and drop columns that the model does not use.",
            code="SG311",
        )
    )
