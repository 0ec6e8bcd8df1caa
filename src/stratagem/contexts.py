"""`StrategyParts`: what programs, contexts and input know of a strategy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stratagem.collectives.islands import Islands
    from stratagem.local_updates import LocalUpdates
    from stratagem.topology import Topology
    from stratagem.variables import Placement, VariableRegistry


class StrategyParts:
    """The parts of a strategy, to which `Strategy` adds the methods of users."""

    topology: Topology
    placement: Placement
    variables: VariableRegistry
    executor: Any  # execution.Executor
    cross_device_ops: Any  # strategies.CrossDeviceOps
    # The method, if replicas train apart for some steps.
    local_updates: LocalUpdates | None = None
    # The groups of replicas that train apart; None if all train in lockstep.
    islands: Islands | None = None
    # The axis of a step's arguments that is split over the devices of a replica; None for no axis.
    sequence_axis: int | None = None

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas that train in sync, with summed gradients."""
        return self.topology.num_replicas
