"""Copies of values on accelerators, made in a save call and sent to the host after it.

A copy on the device takes a hundredth of the time of a transfer. One program per device makes all
of them, in new buffers, so that the steps that follow may donate the originals. Without room on a
device, the rest goes to the host within the call.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import SingleDeviceSharding

from stratagem.checkpoint.storage.staging import PendingArray

# Memory that copies of values may take on accelerators, beside the steps that follow.

# One part of so many stays free, for what no statistics tell: fragments, other programs.
_RESERVE_PART = 16


@dataclasses.dataclass(frozen=True)
class _EarlierCopies:
    """Peak of a device without our copies, and what they took since then."""

    peak_bytes: int
    copies_bytes: int


class DeviceRoom:
    """Counts the free memory of devices while steps have their largest temporaries.

    Steps go on while copies exist, so their peak counts, not the memory between two steps.
    Earlier copies are in a later peak and are subtracted from it.
    """

    def __init__(self) -> None:
        self._seen: dict[jax.Device, _EarlierCopies] = {}

    def left_bytes(self, device: jax.Device, piece_bytes: int) -> int:
        """Returns the memory for copies; 0 if unknown, or if no piece of this size fits."""
        stats = read_stats(device)
        if "bytes_limit" not in stats or "bytes_in_use" not in stats:
            return 0
        limit_bytes = stats["bytes_limit"]
        if _largest_block_bytes(stats) < piece_bytes:
            return 0
        peak_bytes = max(self._peak_bytes(device, stats), stats["bytes_in_use"])
        return max(limit_bytes - peak_bytes - limit_bytes // _RESERVE_PART, 0)

    def take(self, device: jax.Device, size_bytes: int) -> None:
        """Records copies of this size, before they are made."""
        seen, stats = self._seen.get(device), read_stats(device)
        copies_bytes = max(size_bytes, 0 if seen is None else seen.copies_bytes)
        self._seen[device] = _EarlierCopies(self._peak_bytes(device, stats), copies_bytes)

    def _peak_bytes(self, device: jax.Device, stats: Mapping[str, int]) -> int:
        peak_bytes = stats.get("peak_bytes_in_use", 0)
        seen = self._seen.get(device)
        return peak_bytes if seen is None else max(seen.peak_bytes, peak_bytes - seen.copies_bytes)


def read_stats(device: jax.Device) -> Mapping[str, int]:
    """Returns the statistics of a device's memory; empty if it has none."""
    try:
        stats: Any = device.memory_stats()
    except (jax.errors.JaxRuntimeError, RuntimeError):  # the platform does not count
        return {}
    return stats or {}


def _largest_block_bytes(stats: Mapping[str, int]) -> int:
    """Returns the largest block that can be allocated: a free one, or new memory of the pool."""
    limit_bytes = stats["bytes_limit"]
    largest_bytes = stats.get("largest_free_block_bytes", 0)
    if largest_bytes <= 0 or "pool_bytes" not in stats:  # allocators that do not know it
        return limit_bytes
    return max(largest_bytes, limit_bytes - stats["pool_bytes"])


_room = DeviceRoom()


def device_room() -> DeviceRoom:
    """Returns the counts of this process."""
    return _room


_logger = logging.getLogger(__name__)

# Larger arrays are copied in pieces, which bounds the memory on the host during the transfer.
_PIECE_BYTES = 2**27
_NO_MEMORY = "RESOURCE_EXHAUSTED"

_Index = tuple[slice, ...]


@dataclasses.dataclass(frozen=True)
class _CopySource:
    """An array on accelerators: one shard for each part of it, with its place."""

    item: str
    path: str
    array: jax.Array
    shards: tuple[tuple[_Index, jax.Array], ...]

    @property
    def sizes_bytes(self) -> dict[jax.Device, int]:
        """Size of the copies by device."""
        sizes: dict[jax.Device, int] = {}
        for _, shard in self.shards:
            device = _device_of(shard)
            sizes[device] = sizes.get(device, 0) + shard.nbytes
        return sizes


def are_on_accelerator(value: object) -> bool:
    """True for an array in the memory of accelerators, all of which this process can read."""
    if not isinstance(value, jax.Array) or isinstance(value, Tracer) or not value.size:
        return False
    if not (value.is_fully_addressable or value.is_fully_replicated):
        return False
    device = value.addressable_shards[0].device
    kind = value.sharding.memory_kind
    return is_accelerator(device) and kind in (None, device.default_memory().kind)


def is_accelerator(device: jax.Device) -> bool:
    """True for a device with a memory of its own, from which transfers take long."""
    return device.platform != "cpu"


def copy_on_devices(
    items: Mapping[str, Mapping[str, Any]],
) -> dict[str, dict[str, Any]]:
    """Returns arrays by item and path, those on accelerators as copies there, as far as they fit.

    The values are computed, but may be donated to the next step. What does not fit, and values on
    the host, are returned as they are.
    """
    copied: dict[str, dict[str, Any]] = {name: dict(arrays) for name, arrays in items.items()}
    sources = list(_sources(items))
    batches = _batches(sources)
    try:
        for batch in batches:
            for source, pending in zip(batch, _copy(batch), strict=True):
                copied[source.item][source.path] = pending
    except jax.errors.JaxRuntimeError as error:
        if _NO_MEMORY not in str(error):
            raise
    left_bytes = sum(one.array.nbytes for one in sources if copied[one.item][one.path] is one.array)
    if left_bytes:
        _logger.info(
            "Training waits for the transfer of %.3g GB to the host: there is no memory on the "
            "device for a copy of them.",
            left_bytes / 1e9,
        )
    return copied


def keep_on_device(value: Any) -> Any:
    """Returns an array that nothing else uses as it is on its accelerator, if there is room.

    Otherwise, and on other devices, returns it unchanged.
    """
    if not are_on_accelerator(value) or len(value.devices()) > 1:
        return value
    device = _device_of(value)
    if device_room().left_bytes(device, 0) < value.nbytes:
        return value
    return PendingArray(value.shape, np.dtype(value.dtype), ((_whole(value.ndim), value),))


def prepare_copies(items: Mapping[str, Mapping[str, Any]]) -> Callable[[], None]:
    """Returns a function that compiles, in any thread, what copies the arrays on their devices."""
    described = [
        (device, _described(shards))
        for device, shards in _shards_by_device(list(_sources(items))).items()
    ]

    def compile_programs() -> None:
        for device, shapes in described:
            _program(device, shapes, _PIECE_BYTES)

    return compile_programs


def _sources(items: Mapping[str, Mapping[str, Any]]) -> Iterator[_CopySource]:
    """Yields arrays on accelerators; a replicated one is read from the device with least to do."""
    loads: dict[jax.Device, int] = {}
    for item, arrays in items.items():
        for path, array in arrays.items():
            if not are_on_accelerator(array):
                continue
            replicas: dict[str, list[Any]] = {}
            for shard in array.addressable_shards:
                replicas.setdefault(str(shard.index), []).append(shard)
            chosen: list[tuple[_Index, jax.Array]] = []
            for shards in replicas.values():
                shard = min(shards, key=lambda one: loads.get(one.device, 0))
                loads[shard.device] = loads.get(shard.device, 0) + shard.data.nbytes
                chosen.append((shard.index, shard.data))
            yield _CopySource(item, path, array, tuple(chosen))


def _batches(sources: list[_CopySource]) -> list[list[_CopySource]]:
    """Returns what to copy: all at once if it fits, otherwise those that fit, one at a time.

    A program for a few of many arrays would be compiled for each choice.
    """
    largest_bytes = max((min(one.array.nbytes, _PIECE_BYTES) for one in sources), default=0)
    left_bytes: dict[jax.Device, int] = {
        device: device_room().left_bytes(device, largest_bytes)
        for device in _shards_by_device(sources)
    }
    chosen: list[_CopySource] = []
    for source in sources:
        sizes_bytes = source.sizes_bytes
        if all(size <= left_bytes[device] for device, size in sizes_bytes.items()):
            chosen.append(source)
            for device, size in sizes_bytes.items():
                left_bytes[device] -= size
    for device, shards in _shards_by_device(chosen).items():
        device_room().take(device, sum(shard.nbytes for shard in shards))
    if len(chosen) == len(sources):
        return [chosen] if chosen else []
    return [[source] for source in chosen]


def _copy(batch: list[_CopySource]) -> list[PendingArray]:
    """Copies arrays; raises JaxRuntimeError without memory on the device."""
    made: dict[jax.Device, Iterator[list[Any]]] = {}
    for device, shards in _shards_by_device(batch).items():
        with jax.disable_jit(False):  # noqa: FBT003 - compiled programs refuse it
            copies = _program(device, _described(shards), _PIECE_BYTES)(shards)
        # A lack of memory must show here: later, a step may have taken the values.
        made[device] = iter(jax.block_until_ready(copies))
    return [
        PendingArray(
            source.array.shape,
            np.dtype(source.array.dtype),
            tuple(
                (_within(index, place), piece)
                for index, shard in source.shards
                for place, piece in zip(
                    _places(shard, _PIECE_BYTES), next(made[_device_of(shard)]), strict=True
                )
            ),
        )
        for source in batch
    ]


def _shards_by_device(sources: Iterable[_CopySource]) -> dict[jax.Device, list[jax.Array]]:
    shards: dict[jax.Device, list[jax.Array]] = {}
    for source in sources:
        for _, shard in source.shards:
            shards.setdefault(_device_of(shard), []).append(shard)
    return shards


def _described(shards: list[jax.Array]) -> tuple[tuple[tuple[int, ...], Any], ...]:
    return tuple((shard.shape, np.dtype(shard.dtype)) for shard in shards)


@functools.lru_cache(maxsize=64)
def _program(
    device: jax.Device, described: tuple[tuple[tuple[int, ...], Any], ...], piece_bytes: int
) -> Any:
    """Compiles a program that copies arrays of these shapes on a device, without donation."""
    sharding = SingleDeviceSharding(device)

    def compile_program() -> Any:
        with jax.enable_x64(True):  # noqa: FBT003 - the dtypes are those of the arrays
            structs = [jax.ShapeDtypeStruct(*one, sharding=sharding) for one in described]
            return jax.jit(_copies, static_argnums=1).lower(structs, piece_bytes).compile()

    # A mesh that is set in the calling thread, or disabled compilation, must not apply.
    with ThreadPoolExecutor(1, "stratagem-copies") as thread:
        return thread.submit(compile_program).result()


def _copies(arrays: list[jax.Array], piece_bytes: int) -> list[list[jax.Array]]:
    # An output that is an input would be the same buffer.
    return [[jnp.copy(array[place]) for place in _places(array, piece_bytes)] for array in arrays]


def _places(array: jax.Array, piece_bytes: int) -> list[_Index]:
    """Returns the places of the pieces of a shard, cut along its first axis with any length."""
    axis = next((index for index, length in enumerate(array.shape) if length > 1), None)
    if axis is None or array.nbytes <= piece_bytes:
        return [_whole(array.ndim)]
    size = array.shape[axis]
    length = math.ceil(size / min(math.ceil(array.nbytes / piece_bytes), size))
    return [
        (
            *_whole(axis),
            slice(begin, min(begin + length, size)),
            *_whole(array.ndim - axis - 1),
        )
        for begin in range(0, size, length)
    ]


def _within(index: _Index, place: _Index) -> _Index:
    """Returns the place of a piece of a shard in the whole array."""
    return tuple(
        outer
        if inner == slice(None)
        else slice((outer.start or 0) + inner.start, (outer.start or 0) + inner.stop)
        for outer, inner in zip(index, place, strict=True)
    )


def _whole(ndim: int) -> _Index:
    return (slice(None),) * ndim


def _device_of(array: jax.Array) -> jax.Device:
    (device,) = array.devices()
    return device
