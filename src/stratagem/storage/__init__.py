"""Checkpoint files and in-memory snapshots, written here or by a separate process.

Independent of variables; JAX is not loaded before Orbax is called.
"""

from stratagem.storage.files import (
    COMMIT_MARK,
    Arrays,
    Wanted,
    is_whole,
    read_arrays,
    read_manifest,
    write,
)
from stratagem.storage.memory import MemorySlots, Snapshot
from stratagem.storage.process import StorageProcess, storage_process, wait_for_writing

__all__ = [
    "Arrays",
    "COMMIT_MARK",
    "MemorySlots",
    "Snapshot",
    "StorageProcess",
    "Wanted",
    "is_whole",
    "read_arrays",
    "read_manifest",
    "storage_process",
    "wait_for_writing",
    "write",
]
