"""Values of all objects of a checkpoint, as they are when a save is called."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import jax

from stratagem.checkpoint.device_copies import (
    are_on_accelerator,
    copy_on_devices,
    is_accelerator,
    keep_on_device,
    prepare_copies,
)
from stratagem.checkpoint.group_calls import is_first
from stratagem.checkpoint.objects import Part
from stratagem.checkpoint.restoration import COMPONENTS
from stratagem.checkpoint.sharded_values import own_shards, sharded_items_of
from stratagem.checkpoint.storage.pending import PendingArray
from stratagem.checkpoint.storage.process import ArraysToWrite, wait_for_writing
from stratagem.checkpoint.storage.shards import ShardedItems, shards_item
from stratagem.checkpoint.values import gathered_components_of, on_host, whole_values_of
from stratagem.group.current import current_group


def values_to_save(
    parts: Mapping[str, Part],
    items: Mapping[str, str],
    sharded: ShardedItems,
    *,
    is_async: bool,
) -> dict[str, ArraysToWrite]:
    """Returns arrays by item and path; `items` names each object's. Call on every process.

    For an asynchronous save, values on accelerators are copied there, and are sent to the host by
    the thread that writes. `sharded` has the arrays whose shards this process returns; other
    processes than the first return nothing else.
    """
    keep = _drop if not is_first() else _keep if is_async else on_host
    arrays = _whole(parts, items, keep, sharded)
    shards = _shards(parts, items, sharded)
    arrays = arrays | shards if is_first() else shards
    if not is_async:
        return _on_host(arrays)
    if any(are_on_accelerator(value) for of in arrays.values() for value in of.values()):
        wait_for_writing()  # the memory of earlier copies is free then
        arrays = copy_on_devices(arrays)
    return _on_host(arrays)


def copy_program_of(parts: Mapping[str, Part], items: Mapping[str, str]) -> Callable[[], None]:
    """Returns a function that compiles, in any thread, the copies that a save will make.

    Does nothing with several processes, where reading the values takes all of them.
    """
    arrays: dict[str, dict[str, Any]] = {}
    if current_group() is None and any(map(is_accelerator, jax.local_devices())):
        with contextlib.suppress(ValueError):  # leaves that have no values yet
            sharded = sharded_items_of(parts, items)
            arrays = _whole(parts, items, on_host, sharded) | _shards(parts, items, sharded)
    return prepare_copies(arrays)


def _shards(
    parts: Mapping[str, Part], items: Mapping[str, str], sharded: ShardedItems
) -> dict[str, dict[str, Any]]:
    """Returns the shards that this process writes, by the names that storage expects."""
    return {
        shards_item(items[name]): {
            key: shard
            for path, array in sharded[items[name]].items()
            if array is not None
            for key, shard in own_shards(path, part.variables[path].stored)
        }
        for name, part in parts.items()
        if items[name] in sharded
    }


def _whole(
    parts: Mapping[str, Part],
    items: Mapping[str, str],
    keep: Callable[[Any], Any],
    sharded: ShardedItems,
) -> dict[str, dict[str, Any]]:
    """Returns whole values; `keep` gets each that was gathered from several processes."""
    arrays = {
        items[name]: whole_values_of(part, keep, _sharded_paths(sharded, items[name]))
        for name, part in parts.items()
    }
    arrays[COMPONENTS] = {
        f"{items[name]}/{path}": components
        for name, part in parts.items()
        for path, components in gathered_components_of(part, keep).items()
    }
    return arrays


def _sharded_paths(sharded: ShardedItems, item: str) -> set[str]:
    return {path for path, array in sharded.get(item, {}).items() if array is not None}


def _on_host(arrays: Mapping[str, Mapping[str, Any]]) -> dict[str, ArraysToWrite]:
    return {
        item: {
            path: value if isinstance(value, PendingArray) else on_host(value)
            for path, value in of.items()
        }
        for item, of in arrays.items()
    }


def _keep(value: object) -> Any:
    kept = keep_on_device(value)
    return kept if isinstance(kept, PendingArray) else on_host(value)


def _drop(value: object) -> None:
    del value
