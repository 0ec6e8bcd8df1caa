"""The components of an ON_READ variable, one a replica, where processes hold some of them each."""

from __future__ import annotations

from typing import Any

from jax.core import Tracer

from stratagem.options import VariableAggregation
from stratagem.topology import Topology
from stratagem.topology.lockstep import compute_on_every_process
from stratagem.variables.aggregation import aggregate_components

__all__ = ["WholeValue", "gather_together", "stored_components"]


def stored_components(stacked: Any, topology: Topology) -> Any:
    """Puts the components of all replicas on their devices; each process those of its own.

    Args:
        stacked: array of shape (num_replicas, ...).
        topology: the devices.

    Returns:
        The array, sharded over the replica axis.
    """
    if topology.spans_processes and not isinstance(stacked, Tracer):
        first = topology.local_replica_ids[0]
        stacked = stacked[first : first + topology.num_local_replicas]
    return topology.put_stacked(stacked)


class WholeValue:
    """The value that components on several processes stand for; all of them have to ask for it.

    It is kept until the components change: a process that has asked may ask again alone.
    """

    def __init__(self) -> None:
        self.storage: Any = None
        self.gathered: Any = None

    def of(self, storage: Any, aggregation: VariableAggregation, name: str) -> Any:
        """Returns the value.

        Args:
            storage: the components, on several processes.
            aggregation: how they are combined.
            name: of the variable, for messages.

        Returns:
            Array on this process.
        """
        gather_together([(self, storage)])
        return aggregate_components(self.gathered, aggregation, name)


def gather_together(wanted: list[tuple[WholeValue, Any]]) -> None:
    """Gathers components of many variables in one program, for who asks for each of them next.

    Args:
        wanted: values, each with its components on several processes.
    """
    stale = [(whole, storage) for whole, storage in wanted if whole.storage is not storage]
    if stale:
        gathered = compute_on_every_process([storage for _, storage in stale])
        for (whole, storage), components in zip(stale, gathered, strict=True):
            whole.storage, whole.gathered = storage, components
