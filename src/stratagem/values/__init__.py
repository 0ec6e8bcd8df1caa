"""Values that differ between replicas, and values that are the same on all of them."""

from stratagem.values.distributed import DistributedValues, Mirrored, PerReplica
from stratagem.values.regrouping import is_per_replica, regroup, select_replica

__all__ = [
    "DistributedValues",
    "Mirrored",
    "PerReplica",
    "is_per_replica",
    "regroup",
    "select_replica",
]
