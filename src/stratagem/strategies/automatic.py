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
from stratagem.topology.slices import num_slices

__all__ = ["AutomaticOps"]

_NAMED: Mapping[CommunicationImplementation, Algorithm] = {
    CommunicationImplementation.RING: Algorithm.RING,
    CommunicationImplementation.HIERARCHICAL: Algorithm.HIERARCHICAL,
    CommunicationImplementation.NCCL: Algorithm.COMPILER,
}

# The way between slices is slower than that inside one. What is no larger than this is a
# matter of the number of messages only, and the compiler makes one of many.
_SMALL_BYTES = 2**12
_BETWEEN_SLICES = Choice(Algorithm.HIERARCHICAL, ((_SMALL_BYTES, Algorithm.COMPILER),))


class AutomaticOps(BuiltInOps):
    """Combines values as options say, and by a choice where they leave it open.

    Args:
        options: of the user.
        measured: what the algorithm is chosen by where `options.implementation` is AUTO; None for
            the compiler's own; on several slices of TPUs the one in stages.
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
        is_open = self.options.implementation is CommunicationImplementation.AUTO
        has_slices = topology.platform == "tpu" and num_slices(topology.devices) > 1
        choice = _BETWEEN_SLICES if is_open and has_slices else self._choice
        in_bfloat16 = self.options.reduction_dtype == "bfloat16"
        return ChosenAllReduce(ReplicaAxis.of(topology), choice, packing, in_bfloat16=in_bfloat16)
