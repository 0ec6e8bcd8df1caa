"""Restore of large sharded variables: each process reads what its devices need."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from stratagem.checkpoint.creation_hooks import is_in_step
from stratagem.checkpoint.group_calls import agree_on_all, run_on_all, run_on_first
from stratagem.checkpoint.sharded_values import sharded_value_of
from stratagem.checkpoint.storage.available_memory import fits_in_memory
from stratagem.checkpoint.storage.shard_reader import Region, ShardReader
from stratagem.devices.shards import copied_to_device

_METADATA = "_CHECKPOINT_METADATA"
_Array = np.ndarray[Any, Any]


@dataclasses.dataclass(frozen=True)
class SavedValue:
    """A variable, by object and path, and the saved array that becomes its value."""

    name: tuple[str, str]
    variable: Any
    item: str
    entry: Mapping[str, Any]


class ShardedRestore:
    """Values of the variables that are read as shards, of those that a restore sets.

    Values stay on the host until `assign`, so that a damaged checkpoint changes nothing. Without
    memory for that, they are verified first and read one by one. Call on every process.
    """

    def __init__(self, folder: Path, values: Sequence[SavedValue]) -> None:
        self._reader = ShardReader(folder)
        self._values = {one.name: one for one in self._chosen(folder, values)}
        self._read: dict[tuple[str, str], list[_Array]] = {}

    def __contains__(self, name: tuple[str, str]) -> bool:
        return name in self._values

    def read(self) -> None:
        """Reads or verifies all shards; raises DataLossError for damage, on all processes."""
        if not self._values:
            return
        size_bytes = sum(_local_bytes(one) for one in self._values.values())
        fits = agree_on_all("Checkpoint.restore", fits_in_memory(size_bytes))

        def work() -> None:
            for one in self._values.values():
                regions = list(_regions(one.variable).values())
                if fits:
                    self._read[one.name] = self._reader.read(one.item, one.entry, regions)
                else:
                    self._reader.verify(one.item, one.entry, regions)

        run_on_all("Checkpoint.restore", work)

    def assign(self) -> None:
        """Sets the variables."""
        for one in self._values.values():
            if one.name in self._read:
                _set_shards(one.variable, self._read.pop(one.name))
            else:
                run_on_all("Checkpoint.restore", self._assignment(one))

    def _assignment(self, one: SavedValue) -> Callable[[], None]:
        regions = list(_regions(one.variable).values())
        return lambda: _set_shards(one.variable, self._reader.read(one.item, one.entry, regions))

    def _chosen(self, folder: Path, values: Sequence[SavedValue]) -> list[SavedValue]:
        sharded = [one for one in values if sharded_value_of(one.variable) is not None]
        if not sharded or is_in_step() or not _is_same_everywhere(folder):
            return []
        readable = run_on_first(
            "Checkpoint.restore",
            lambda: [self._reader.can_read(one.item, one.entry) for one in sharded],
        )
        return [one for one, can_read in zip(sharded, readable, strict=True) if can_read]


def _is_same_everywhere(folder: Path) -> bool:
    """True if all processes find the checkpoint of process 0."""

    def digest() -> int | None:
        try:
            return zlib.crc32((folder / _METADATA).read_bytes())
        except OSError:
            return None

    expected = run_on_first("Checkpoint.restore", digest)
    return agree_on_all("Checkpoint.restore", expected is not None and digest() == expected)


def _regions(variable: Any) -> dict[str, Region]:
    """Returns the parts of a value that devices of this process hold, each once."""
    return {str(region): region for region in _regions_by_device(variable).values()}


def _regions_by_device(variable: Any) -> dict[jax.Device, Region]:
    array = variable.stored
    indices = array.sharding.addressable_devices_indices_map(array.shape)
    return {
        device: tuple(
            slice(*one.indices(size)[:2]) for one, size in zip(index, array.shape, strict=True)
        )
        for device, index in indices.items()
    }


def _local_bytes(one: SavedValue) -> int:
    array = one.variable.stored
    shard_size = int(np.prod(array.sharding.shard_shape(array.shape)))
    return len(_regions(one.variable)) * shard_size * np.dtype(one.entry["dtype"]).itemsize


def _set_shards(variable: Any, shards: list[_Array]) -> None:
    """Sets a variable from the values of its `_regions`."""
    old = variable.stored
    by_region = dict(zip(_regions(variable), shards, strict=True))
    placed = [
        copied_to_device(by_region[str(region)].astype(old.dtype, copy=False), device, old.sharding)
        for device, region in _regions_by_device(variable).items()
    ]
    variable.stored = jax.make_array_from_single_device_arrays(
        old.shape, old.sharding, jax.block_until_ready(placed)
    )
