"""Transfer of batches to the devices: large arrays by JAX, small ones by a compiled program."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from stratagem.devices.exact_integers import require_exact_integers
from stratagem.devices.mesh import Topology

# `jax.device_put` takes 20 us or more for an array; a program that returns its arguments takes 4.
# It copies them, which takes longer from about this size.
_SMALL_BYTES = 1 << 16


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
