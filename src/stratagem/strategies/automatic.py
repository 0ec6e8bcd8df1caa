"""The cross-device ops that a strategy has when none were given to it."""

from __future__ import annotations

from collections.abc import Mapping

from stratagem.collectives import (
    Algorithm,
    AllReduce,
    Choice,
    ChosenAllReduce,
    MeasuredChoice,
    ReplicaAxis,
    packing_for,
)
from stratagem.collectives.packing import NO_PACKING
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
        measured: what the algorithm is chosen by where `options.implementation` is AUTO; None for
            the compiler's own.
    """

    def __init__(
        self, options: CommunicationOptions | None = None, measured: MeasuredChoice | None = None
    ) -> None:
        self.options = options or CommunicationOptions()
        self.measured = measured
        implementation = self.options.implementation
        if isinstance(implementation, CommunicationImplementation) and implementation in _NAMED:
            self._choice = Choice(_NAMED[implementation])
        else:
            self._choice = measured.choice if measured else Choice()

    def all_reduce(self, topology: Topology) -> AllReduce:
        """Returns how a step on some devices combines values.

        Where a replica has several devices, the compiler's own sums keep apart what is divided over
        them; arrays that are joined, or cut in pieces, would be brought together first.
        """
        if topology.groups is not None:
            return ChosenAllReduce(ReplicaAxis.of(topology), Choice(), NO_PACKING)
        packing = packing_for(
            topology.platform,
            spans_processes=topology.spans_processes,
            bytes_per_pack=self.options.bytes_per_pack,
        )
        in_bfloat16 = self.options.reduction_dtype == "bfloat16"
        return ChosenAllReduce(
            ReplicaAxis.of(topology), self._choice, packing, in_bfloat16=in_bfloat16
        )
