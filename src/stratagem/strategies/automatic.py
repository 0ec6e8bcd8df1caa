"""The cross-device ops that a strategy has when none were given to it."""

from __future__ import annotations

from collections.abc import Mapping

from stratagem.collectives import (
    Algorithm,
    AllReduce,
    Choice,
    ChosenAllReduce,
    ReplicaAxis,
    packing_for,
)
from stratagem.communication import CommunicationImplementation, CommunicationOptions
from stratagem.strategies.cross_device_ops import BuiltInOps
from stratagem.topology import Topology

__all__ = ["AutomaticOps"]

_NAMED: Mapping[CommunicationImplementation, Algorithm] = {
    CommunicationImplementation.RING: Algorithm.RING,
    CommunicationImplementation.HIERARCHICAL: Algorithm.HIERARCHICAL,
    CommunicationImplementation.NCCL: Algorithm.COMPILER,
}


class AutomaticOps(BuiltInOps):
    """Combines values as options say, and by a choice where they leave it open.

    Args:
        options: of the user.
        choice: of the algorithm, where `options.implementation` is AUTO.
    """

    def __init__(
        self, options: CommunicationOptions | None = None, choice: Choice | None = None
    ) -> None:
        self.options = options or CommunicationOptions()
        implementation = self.options.implementation
        named = None if isinstance(implementation, str) else _NAMED.get(implementation)
        self.choice = (choice or Choice()) if named is None else Choice(named)

    def all_reduce(self, topology: Topology) -> AllReduce:
        """Returns how a step on some devices combines values."""
        packing = packing_for(
            topology.platform,
            spans_processes=topology.spans_processes,
            bytes_per_pack=self.options.bytes_per_pack,
        )
        in_bfloat16 = self.options.reduction_dtype == "bfloat16"
        return ChosenAllReduce(
            ReplicaAxis.of(topology), self.choice, packing, in_bfloat16=in_bfloat16
        )
