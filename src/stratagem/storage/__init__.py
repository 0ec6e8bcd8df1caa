"""Checkpoint files and in-memory snapshots, written here or by a separate process.

Independent of variables; JAX is not loaded before Orbax is called.
"""

from stratagem.storage.available_memory import fits_in_memory
from stratagem.storage.files import (
    COMMIT_MARK,
    Arrays,
    Wanted,
    check_arrays,
    is_whole,
    portions,
    read_arrays,
    read_manifest,
    write,
)
from stratagem.storage.large_arrays import Receiver
from stratagem.storage.memory import MemorySlots, Snapshot
from stratagem.storage.pending import PendingArray
from stratagem.storage.process import (
    ArraysToWrite,
    StorageProcess,
    has_room_for_copy,
    storage_process,
    wait_for_writing,
)
from stratagem.storage.shard_reader import Region, ShardReader
from stratagem.storage.shards import (
    ShardedArray,
    ShardedItems,
    ShardedWrite,
    is_of_shards,
    remove_shards,
    report_shard_error,
    shard_key,
    shards_item,
    write_shards,
)

__all__ = [
    "Arrays",
    "ArraysToWrite",
    "COMMIT_MARK",
    "MemorySlots",
    "PendingArray",
    "Receiver",
    "Region",
    "ShardReader",
    "ShardedArray",
    "ShardedItems",
    "ShardedWrite",
    "Snapshot",
    "StorageProcess",
    "Wanted",
    "check_arrays",
    "fits_in_memory",
    "has_room_for_copy",
    "is_of_shards",
    "is_whole",
    "portions",
    "read_arrays",
    "read_manifest",
    "remove_shards",
    "report_shard_error",
    "shard_key",
    "shards_item",
    "storage_process",
    "wait_for_writing",
    "write",
    "write_shards",
]
