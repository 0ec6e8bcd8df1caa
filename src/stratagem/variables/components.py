"""Storage and gathering of an ON_READ variable's components, one per replica."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jax.core import Tracer

from stratagem.devices.lockstep import compute_on_every_process
from stratagem.devices.mesh import Topology
from stratagem.options import VariableAggregation
from stratagem.variables.aggregation import aggregate_components

if TYPE_CHECKING:
    import jax
    import numpy as np


def stored_components(stacked: jax.Array | np.ndarray, topology: Topology) -> Any:
    """Shards an array of shape (num_replicas, ...) over the replicas' devices."""
    if topology.spans_processes and not isinstance(stacked, Tracer):
        first = topology.local_replica_ids[0]
        stacked = stacked[first : first + topology.num_local_replicas]
    return topology.put_stacked(stacked)


def store_components(variable: Any, stacked: jax.Array | np.ndarray, topology: Topology) -> None:
    """Stores an array of shape (num_replicas, ...), the same on all processes, in a variable."""
    variable.storage = stored_components(stacked, topology)
    if topology.spans_processes and not isinstance(stacked, Tracer):
        variable.whole.hold(variable.storage, stacked)


class WholeValue:
    """Cached value of a variable whose components are on several processes.

    All processes must read it together. Until the components change, each can then read it alone.
    """

    def __init__(self) -> None:
        self.storage: Any = None
        self.gathered: Any = None

    def hold(self, storage: object, gathered: object) -> None:
        """Caches the components of all replicas, which this process has."""
        self.storage, self.gathered = storage, gathered

    def of(self, storage: object, aggregation: VariableAggregation, name: str) -> Any:
        """Returns the aggregated value of the components, on this process."""
        gather_together([(self, storage)])
        return aggregate_components(self.gathered, aggregation, name)


def gather_together(wanted: list[tuple[WholeValue, Any]]) -> None:
    """Gathers many variables' components in one program and caches them.

    `wanted` pairs each cache with its components. All processes must call this together.
    """
    stale = [(whole, storage) for whole, storage in wanted if whole.storage is not storage]
    if stale:
        gathered = compute_on_every_process([storage for _, storage in stale])
        for (whole, storage), components in zip(stale, gathered, strict=True):
            whole.hold(storage, components)
