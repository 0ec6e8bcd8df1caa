"""Transfer of batches of one signature to the devices, one by one or several steps at once."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from stratagem.devices.mesh import Topology
from stratagem.devices.shards import require_exact_integers
from stratagem.input.batches import (
    DeviceRows,
    HostBatch,
    name_of_array,
    padded,
    select_rows,
    unflatten,
)
from stratagem.variables.distributed import PerReplica, is_array

# Transfer of batches to the devices: large arrays by JAX, small ones by a compiled program.

# `jax.device_put` takes 20 us or more for an array; a program that returns its arguments takes 4.
# It copies them, which takes longer from about this size.
_SMALL_BYTES = 1 << 16
# After so many groups, others of the same shapes are likely to follow.
MANY_GROUPS = 16


def put_arrays(
    arrays: Sequence[np.ndarray[Any, Any] | jax.Array],
    topology: Topology,
    *,
    many: bool,
    is_repeated: bool,
    name_of: Callable[[int], str] | None = None,
) -> list[jax.Array]:
    """Puts arrays with a replica axis, if there are several replicas, on the devices.

    `many` is True if they have an axis of steps before that. `is_repeated` is True if many arrays
    of these shapes follow, so that a program is worth its compilation. `name_of` returns the name
    of an array by its position, for messages.

    Raises:
        OverflowError: JAX would change 64-bit integers.
    """
    require_exact_integers(arrays, name_of)
    if is_repeated and are_small(arrays, topology):
        return _put_small(_copied(arrays), topology, axis=1 if many else 0)
    moved = [_put(array, topology, many=many) for array in arrays]
    is_large = any(isinstance(one, np.ndarray) and one.nbytes > _SMALL_BYTES for one in arrays)
    if is_large and _waits_for_programs(topology):
        _begin_before_later_programs(topology)
    return moved


def _waits_for_programs(topology: Topology) -> bool:
    return not topology.is_abstract and topology.platform == "gpu"


def _begin_before_later_programs(topology: Topology) -> None:
    """Lets transfers to GPUs wait only for the programs that were started before them.

    XLA's transfer waits for an event of the device's programs, since its memory may be theirs. The
    event is recorded when the data has been copied to pinned memory, or at the end of the program
    started next. So an empty program comes next, in place of the steps that the transfer is to
    overlap.
    """
    own = jax.process_index()
    for device in topology.all_devices or jax.local_devices()[:1]:
        if device.process_index == own:
            _empty_program(device)()


@functools.lru_cache(maxsize=64)
def _empty_program(device: jax.Device) -> Callable[[], jax.Array]:
    return jax.jit(lambda: jnp.zeros((), bool), out_shardings=SingleDeviceSharding(device))


def are_small(arrays: Sequence[np.ndarray[Any, Any] | jax.Array], topology: Topology) -> bool:
    """Returns True for arrays of the host that a program puts on these devices faster than JAX."""
    is_here = topology.groups is None and not topology.spans_processes and not topology.is_abstract
    return (
        is_here
        and bool(arrays)
        and all(isinstance(one, np.ndarray) and one.nbytes <= _SMALL_BYTES for one in arrays)
    )


def put_steps(
    arrays: Sequence[np.ndarray[Any, Any]],
    topology: Topology,
    name_of: Callable[[int], str] | None = None,
) -> list[list[jax.Array]]:
    """Puts small arrays with an axis of steps on the devices; returns the arrays of each step.

    One program does both, which is faster than a transfer of each step, also on several devices.
    `name_of` and errors are those of `put_arrays`.
    """
    require_exact_integers(arrays, name_of)
    several = topology.num_replicas > 1
    sharding = topology.stacked if several else topology.replicated
    return _unstacking(None if topology.devices is None else sharding)(*_copied(arrays))


def _copied(arrays: Sequence[np.ndarray[Any, Any] | jax.Array]) -> list[np.ndarray[Any, Any]]:
    """Copies arrays: a program may still read its arguments after the call has returned."""
    return [np.array(array) for array in arrays]


@functools.lru_cache(maxsize=64)
def _unstacking(sharding: Sharding | None) -> Callable[..., list[list[jax.Array]]]:
    return jax.jit(_unstacked, out_shardings=sharding)


def _unstacked(*arrays: jax.Array) -> list[list[jax.Array]]:
    return [[array[step] for array in arrays] for step in range(arrays[0].shape[0])]


def _put_small(
    arrays: Sequence[np.ndarray[Any, Any] | jax.Array], topology: Topology, *, axis: int
) -> list[jax.Array]:
    if topology.devices is None or topology.num_replicas == 1:
        (program,) = _programs(None if topology.devices is None else topology.replicated)
        return list(program(*arrays))
    # A program on several devices takes arrays of the host as slowly as `jax.device_put`.
    before = (slice(None),) * axis
    parts = [
        program(*(array[(*before, slice(index, index + 1))] for array in arrays))
        for index, program in enumerate(_programs(*topology.devices))
    ]
    sharding = topology.stacked_steps if axis else topology.stacked
    return [
        jax.make_array_from_single_device_arrays(array.shape, sharding, list(own))
        for array, own in zip(arrays, zip(*parts, strict=True), strict=True)
    ]


@functools.lru_cache(maxsize=64)
def _programs(*places: Sharding | jax.Device | None) -> list[Callable[..., Sequence[jax.Array]]]:
    """Returns a program for each device or sharding; None is JAX's default device."""
    shardings = [
        SingleDeviceSharding(place) if isinstance(place, jax.Device) else place for place in places
    ]
    return [jax.jit(_returned, out_shardings=sharding) for sharding in shardings]


def _returned(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    return arrays


def _put(array: np.ndarray[Any, Any] | jax.Array, topology: Topology, *, many: bool) -> jax.Array:
    if topology.num_replicas > 1:
        sharding = topology.stacked_steps if many else topology.stacked
        if isinstance(array, jax.Array) and array.sharding == sharding:
            return array
        return topology.put_stacked(array, axis=1 if many else 0)
    if topology.devices is not None and isinstance(array, jax.Array):
        return array if array.sharding == topology.replicated else topology.replicate(array)
    return topology.replicate(array)


@dataclasses.dataclass(frozen=True)
class HostSteps:
    """This process's parts of several batches of one signature, without padding.

    `first` is the first of them. Arrays have shape (steps, rows, ...).
    """

    first: HostBatch
    arrays: list[Any]
    num_steps: int

    def batches(self) -> list[HostBatch]:
        """Returns each batch on its own."""
        return [
            dataclasses.replace(self.first, arrays=[array[step] for array in self.arrays])
            for step in range(self.num_steps)
        ]


@dataclasses.dataclass(frozen=True)
class PlacedBatches:
    """Batches of one signature on the devices; fields as in `HostBatch`.

    Arrays have shape (n, size, ...) for n replicas of all processes, or (steps, n, size, ...) for
    several steps; one replica has no n axis. Non-numeric arrays stay on the host. `lengths` are of
    all processes, `local_lengths` of this one. `hosts` are the batches on the host, if these may be
    split again.
    """

    structure: Any
    is_array: tuple[bool, ...]
    arrays: list[Any]
    num_replicas: int
    num_steps: int
    size: int
    lengths: tuple[int, ...] | None
    local_lengths: tuple[int, ...]
    signature: Any
    hosts: list[HostBatch] = dataclasses.field(default_factory=list[HostBatch])

    def value(self) -> Any:
        """Returns the only batch as a pytree of `PerReplica`, or of arrays for one replica."""
        assert self.num_steps == 1
        return unflatten(self.structure, self.is_array, [self._leaf(a) for a in self.arrays])

    def _leaf(self, array: jax.Array | np.ndarray) -> Any:
        if self.num_replicas == 1:
            return array if self.lengths is None else array[: self.local_lengths[0]]
        if is_array(array):
            return PerReplica(stacked=array, lengths=self.lengths)
        pairs = zip(array, self.local_lengths, strict=True)
        return PerReplica(objects=tuple(part[:length] for part, length in pairs))

    def name_of(self, place: int) -> str:
        """Returns the name of an array in messages."""
        return name_of_array(self.structure, self.is_array, place)

    def step_shape(self, array: jax.Array | np.ndarray) -> tuple[int, ...]:
        """Returns the shape of an array for one step."""
        return array.shape[1:] if self.num_steps > 1 else array.shape


def place(
    batches: list[HostBatch] | HostSteps,
    topology: Topology,
    *,
    to_device: bool = True,
    is_repeated: bool = False,
) -> PlacedBatches:
    """Transfers batches of one signature to the devices.

    With `to_device=False`, only splits them. `is_repeated` is True if many calls of this signature
    follow.
    """
    joined: Any
    if isinstance(batches, HostSteps):
        first, joined, num_steps = batches.first, batches.arrays, batches.num_steps
    else:
        columns: Any = zip(*(batch.arrays for batch in batches), strict=True)
        first, joined, num_steps = batches[0], list(columns), len(batches)
    count, size = topology.num_local_replicas, first.size
    steps = () if num_steps == 1 else (num_steps,)
    rows = (count, size) if topology.num_replicas > 1 else (size,)
    if first.is_uneven:  # one replica, whose arrays keep their rows
        joined = [parts[0] if num_steps == 1 else _stacked(parts) for parts in joined]
        placed = joined
    else:
        if not isinstance(batches, HostSteps):
            joined = _joined(joined, count * size, (*steps, *rows), topology)
        placed = [
            _reshaped(array, (*steps, *rows, *own.shape[1:]))
            for array, own in zip(joined, first.arrays, strict=True)
        ]
    if to_device:
        places = [index for index, array in enumerate(placed) if is_array(array)]
        arrays = [placed[index] for index in places]
        moved = put_arrays(
            arrays,
            topology,
            many=num_steps > 1,
            is_repeated=is_repeated,
            name_of=lambda index: name_of_array(first.structure, first.is_array, places[index]),
        )
        for index, array in zip(places, moved, strict=True):
            placed[index] = array
    return PlacedBatches(
        first.structure,
        first.is_array,
        placed,
        topology.num_replicas,
        num_steps,
        size,
        first.all_lengths,
        first.lengths or (size,) * count,
        first.signature,
    )


def _reshaped(array: Any, shape: tuple[int, ...]) -> Any:
    return array if array.shape == shape else array.reshape(shape)


def _joined(
    columns: list[Any], num_rows: int, shape: tuple[int, ...], topology: Topology
) -> list[Any]:
    """Pads batches, and stacks several."""
    on_devices = [column for column in columns if isinstance(column[0], DeviceRows)]
    selected = iter(select_rows(on_devices, num_rows, shape, topology))
    joined: list[Any] = []
    for column in columns:
        if isinstance(column[0], DeviceRows):
            joined.append(next(selected))
            continue
        parts = [padded(array, num_rows) for array in column]
        joined.append(parts[0] if len(parts) == 1 else _stacked(parts))
    return joined


def _stacked(parts: list[Any]) -> Any:
    if isinstance(parts[0], jax.Array):
        return jnp.stack(parts)
    view = _as_one_view(parts)
    return np.stack(parts) if view is None else view


def _as_one_view(parts: list[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any] | None:
    """Stacks consecutive slices of one array without copying; returns None for others."""
    first = parts[0]
    if first.base is None or any(part.base is not first.base for part in parts):
        return None
    follow = all(
        part.flags.c_contiguous and part.ctypes.data == first.ctypes.data + index * first.nbytes
        for index, part in enumerate(parts)
    )
    if not follow:
        return None
    shape, strides = (len(parts), *first.shape), (first.nbytes, *first.strides)
    return np.lib.stride_tricks.as_strided(first, shape, strides, writeable=False)
