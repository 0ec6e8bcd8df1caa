"""Automatic choice of cross-device ops, for strategies without explicit ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stratagem.devices.collectives.all_reduce import AllReduce, ChosenAllReduce
from stratagem.devices.collectives.axis import ReplicaAxis
from stratagem.devices.collectives.choice import Algorithm, Choice
from stratagem.devices.collectives.measurement import MeasuredChoice
from stratagem.devices.collectives.packing import NO_PACKING, packing_for
from stratagem.devices.communication import CommunicationImplementation, CommunicationOptions
from stratagem.devices.compression import AUTO, Compression
from stratagem.devices.mesh import Topology
from stratagem.devices.slices import num_slices
from stratagem.execution.compression_advice import MeasuredLink, advice_lines
from stratagem.messages import explain
from stratagem.strategies.base.built_in_ops import BuiltInOps

_NAMED: Mapping[CommunicationImplementation, Algorithm] = {
    CommunicationImplementation.RING: Algorithm.RING,
    CommunicationImplementation.HIERARCHICAL: Algorithm.HIERARCHICAL,
    CommunicationImplementation.TWO_STAGE: Algorithm.TWO_STAGE,
    CommunicationImplementation.NCCL: Algorithm.COMPILER,
}

# Connections between slices are slower than those inside one. Up to this size only the number of
# messages matters, and the compiler merges them into one.
_SMALL_BYTES = 2**12
_BETWEEN_SLICES = Choice(Algorithm.HIERARCHICAL, ((_SMALL_BYTES, Algorithm.COMPILER),))


class AutomaticOps(BuiltInOps):
    """Combines values by the communication options, and chooses the algorithm if they are AUTO.

    Args:
        options: the user's options.
        measured: chooses the algorithm if `options.implementation` is AUTO; None for the compiler's
            own, or on several TPU slices the staged one.
        link: what compression would gain on, if `options.compression` is "auto".
    """

    def __init__(
        self,
        options: CommunicationOptions | None = None,
        measured: MeasuredChoice | None = None,
        link: MeasuredLink | None = None,
    ) -> None:
        self.options = options or CommunicationOptions()
        self.measured = measured
        self.link = link
        implementation = self.options.implementation
        if isinstance(implementation, CommunicationImplementation) and implementation in _NAMED:
            self._choice = Choice(_NAMED[implementation])
        else:
            self._choice = measured.choice if measured else Choice()

    @property
    def compression(self) -> Compression | None:
        """The compression of the options; none for "auto", which only advises."""
        compression = self.options.compression
        return None if isinstance(compression, str) else compression

    def advice(self, shapes: Sequence[tuple[int, ...]], num_replicas: int) -> list[str]:
        """Returns what "auto" says of gradients of these shapes; nothing if it was not asked."""
        is_asked = self.options.compression == AUTO
        return advice_lines(shapes, self.link, num_replicas) if is_asked else []

    def all_reduce(self, topology: Topology) -> AllReduce:
        """Returns the all-reduce of a step on some devices.

        If replicas have several devices, it is the compiler's own sum, which keeps shards
        apart; packing or splitting arrays would gather them first.
        """
        if topology.groups is not None:
            return ChosenAllReduce(ReplicaAxis.of(topology), Choice(), NO_PACKING)
        packing = packing_for(
            topology.platform,
            spans_processes=topology.spans_processes,
            bytes_per_pack=self.options.bytes_per_pack,
            times_s=self.measured.fastest_s if self.measured else None,
        )
        is_open = self.options.implementation is CommunicationImplementation.AUTO
        has_slices = topology.platform == "tpu" and num_slices(topology.devices) > 1
        choice = _BETWEEN_SLICES if is_open and has_slices else self._choice
        in_bfloat16 = self.options.reduction_dtype == "bfloat16"
        return ChosenAllReduce(ReplicaAxis.of(topology), choice, packing, in_bfloat16=in_bfloat16)


class CompressedAllReduce(AutomaticOps):
    """Sums gradients in a lossy form, with the errors made up for in later steps.

    Other sums, such as those of metrics, are exact.

    Args:
        compression: an object such as `sg.compression.Int8()`, or its name.

    Raises:
        ValueError: an unknown name. The strategy raises it for sharded or host-side state.
        TypeError: another type.

    Example:
        >>> ops = sg.CompressedAllReduce(sg.compression.PowerSGD(rank=2))
        >>> strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops=ops)

    Source: specific to Stratagem; `sg.compression` names the papers.
    """

    def __init__(self, compression: Compression | str) -> None:
        options = CommunicationOptions(compression=compression)
        if options.compression == AUTO:
            raise ValueError(
                explain(
                    f"CompressedAllReduce received compression={compression!r}.",
                    expected="a compression: the automatic choice only advises.",
                    fix='pass "int8", for example, or CommunicationOptions(compression="auto").',
                )
            )
        super().__init__(options)

    def __repr__(self) -> str:
        return f"CompressedAllReduce({self.compression})"
