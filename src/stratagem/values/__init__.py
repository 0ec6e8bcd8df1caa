"""Distributed values: `PerReplica`, `Mirrored`, `IndexedSlices`, and regrouping of structures."""

from stratagem.values.distributed import DistributedValues, Mirrored, Participation, PerReplica
from stratagem.values.indexed_slices import IndexedSlices, is_indexed_slices
from stratagem.values.regrouping import is_per_replica, regroup, select_replica

__all__ = [
    "DistributedValues",
    "IndexedSlices",
    "Mirrored",
    "Participation",
    "PerReplica",
    "is_indexed_slices",
    "is_per_replica",
    "regroup",
    "select_replica",
]
