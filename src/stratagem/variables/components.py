"""The components of an ON_READ variable, one a replica, where processes hold some of them each."""

from __future__ import annotations

from typing import Any

from jax.core import Tracer

from stratagem.options import VariableAggregation
from stratagem.topology import Topology
from stratagem.topology.lockstep import on_every_process
from stratagem.variables.aggregation import aggregate_components

__all__ = ["WholeValue", "stored_components"]


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
        self._storage: Any = None
        self._value: Any = None

    def of(self, storage: Any, aggregation: VariableAggregation, name: str) -> Any:
        """Returns the value.

        Args:
            storage: the components, on several processes.
            aggregation: how they are combined.
            name: of the variable, for messages.

        Returns:
            Array on this process.
        """
        if self._storage is not storage:
            components = on_every_process(storage)
            self._value = aggregate_components(components, aggregation, name)
            self._storage = storage
        return self._value
