"""Contexts of a call (cross-replica, replica, update), and the current strategy."""

from stratagem.context.batch import ReplicaBatch
from stratagem.context.gathering import all_gather
from stratagem.context.replica import ReplicaContext, get_replica_context
from stratagem.context.stack import (
    experimental_set_strategy,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
    in_update_context,
    set_strategy,
)

__all__ = [
    "ReplicaBatch",
    "ReplicaContext",
    "all_gather",
    "experimental_set_strategy",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
    "in_update_context",
    "set_strategy",
]
