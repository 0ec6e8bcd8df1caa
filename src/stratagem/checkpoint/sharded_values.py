"""Shards of large variables, which each process saves without gathering them."""

from __future__ import annotations

import glob
import math
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import jax
import numpy as np

from stratagem.checkpoint import storage
from stratagem.checkpoint.group_calls import agree_on_all, is_first, run_on_first
from stratagem.checkpoint.objects import Part
from stratagem.checkpoint.storage.shards import ShardedArray, ShardedItems, ShardedWrite, shard_key
from stratagem.group.current import current_group
from stratagem.variables.kind import VariableKind
from stratagem.variables.registry import home_of
from stratagem.variables.store import store_of

# Smaller values are gathered: their shards would be many small pieces of a file.
_MIN_BYTES = 2**20
_TEMPORARY = ".orbax-checkpoint-tmp-"


def sharded_value_of(variable: object) -> jax.Array | None:
    """Returns the array of a large variable with a shard on each device; None for others."""
    home, stored = home_of(variable), getattr(variable, "stored", None)
    is_divided = store_of(variable) is not None or getattr(variable, "division", None) is not None
    if home is None or home.kind is VariableKind.ON_READ or not is_divided:
        return None
    if getattr(variable, "local_copy", None) is not None:  # processes have values of their own
        return None
    if not isinstance(stored, jax.Array) or stored.is_fully_replicated:
        return None
    return stored if stored.nbytes >= _MIN_BYTES else None


def own_shards(path: str, array: jax.Array) -> Iterator[tuple[str, jax.Array]]:
    """Yields the shards that this process saves, of copies one, with the keys of a checkpoint."""
    shape = array.sharding.shard_shape(array.shape)
    for shard in array.addressable_shards:
        if shard.replica_id == 0:
            begins = (one.start or 0 for one in shard.index)
            position = (at // size for at, size in zip(begins, shape, strict=True))
            yield shard_key(path, tuple(position)), shard.data


def sharded_items_of(parts: Mapping[str, Part], items: Mapping[str, str]) -> ShardedItems:
    """Returns the items with variables that are saved as shards."""
    arrays = {items[name]: _sharded_arrays(part) for name, part in parts.items()}
    return {item: of for item, of in arrays.items() if any(of.values())}


def begin_sharded_write(
    folder: Path, parts: Mapping[str, Part], items: Mapping[str, str]
) -> ShardedWrite | None:
    """Returns where processes write their shards; None if all values are gathered.

    Several processes write shards if all of them see a temporary folder that process 0 creates
    beside the checkpoint. Call on every process.
    """
    arrays = sharded_items_of(parts, items)
    if not arrays:
        return None
    group = current_group()
    created = run_on_first("Checkpoint.write", lambda: _create_beside(folder))
    if created is None:
        return None
    temporary = Path(created)
    if not agree_on_all("Checkpoint.write", temporary.is_dir()):
        if is_first():
            shutil.rmtree(temporary, ignore_errors=True)
        return None
    return ShardedWrite(temporary, 1 if group is None else group.num_processes, arrays)


def bytes_to_write(part: Part) -> int:
    """Returns the size of what this process writes of an object, without components."""
    size_bytes = 0
    for path, variable in part.variables.items():
        array = sharded_value_of(variable)
        if array is not None:
            size_bytes += sum(shard.nbytes for _, shard in own_shards(path, array))
        elif is_first():
            size_bytes += math.prod(variable.shape) * np.dtype(variable.dtype).itemsize
    return size_bytes


def _sharded_arrays(part: Part) -> dict[str, ShardedArray | None]:
    return {path: _described(sharded_value_of(one)) for path, one in part.variables.items()}


def _described(array: jax.Array | None) -> ShardedArray | None:
    if array is None:
        return None
    shard_shape = array.sharding.shard_shape(array.shape)
    return ShardedArray(array.shape, str(np.dtype(array.dtype)), shard_shape)


def _create_beside(folder: Path) -> str | None:
    """Creates a temporary folder, and removes those that a killed save of this name left."""
    stale = list(folder.parent.glob(f"{glob.escape(folder.name)}{_TEMPORARY}*"))
    if stale:
        storage.wait_for_writing()
    for one in stale:
        shutil.rmtree(one, ignore_errors=True)
    temporary = folder.with_name(f"{folder.name}{_TEMPORARY}{secrets.token_hex(4)}")
    try:
        temporary.mkdir(parents=True)
    except OSError:  # the write itself finds the reason
        return None
    return str(temporary)
