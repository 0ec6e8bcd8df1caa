"""Automatic choice of cross-device ops, for strategies without explicit ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from stratagem.devices.collectives.all_reduce import (
    AllReduce,
    ChosenAllReduce,
    GatheredAllReduce,
    mean_of,
)
from stratagem.devices.collectives.axis import ReplicaAxis
from stratagem.devices.collectives.choice import Algorithm, Choice
from stratagem.devices.collectives.measurement import MeasuredChoice
from stratagem.devices.collectives.packing import NO_PACKING, NumberedPacks, packing_for
from stratagem.devices.communication import CommunicationImplementation, CommunicationOptions
from stratagem.devices.compression import AUTO, Compression
from stratagem.devices.finding import DeviceLike, find_devices
from stratagem.devices.mesh import Topology
from stratagem.devices.tpu_coordinates import num_slices
from stratagem.errors import explain
from stratagem.execution.compression_advice import MeasuredLink, advice_lines
from stratagem.options import ReduceOp
from stratagem.strategies.base import reduction
from stratagem.strategies.base.cross_device_ops import CrossDeviceOps
from stratagem.variables.distributed import Mirrored, PerReplica

# This library's cross-device ops: one class for each algorithm.


class BuiltInOps(CrossDeviceOps):
    """Base of this library's algorithms: their reduction outside of steps."""

    is_built_in = True

    def reduce_implementation(
        self, reduce_op: ReduceOp, per_replica_value: object, destinations: object, options: object
    ) -> Any:
        """Combines one value."""
        value = per_replica_value
        if isinstance(value, PerReplica) and value.local is not None:
            topology = reduction.merge_context().strategy.topology
            return Mirrored(self.all_reduce(topology).one(reduce_op, value.local))
        count = 1
        if isinstance(value, PerReplica):
            count = len(value.objects or ()) if value.stacked is None else value.stacked.shape[0]
        return Mirrored(reduction.reduce(reduce_op, value, None, num_replicas=count))


class AlgorithmicOps(BuiltInOps):
    """One algorithm for all sizes.

    Args:
        num_packs: number of messages to pack gradients into; 0 for one per gradient.

    Raises:
        ValueError: `num_packs` is negative or not a number.
    """

    _algorithm = Algorithm.COMPILER

    def __init__(self, num_packs: int = 1) -> None:
        if not isinstance(num_packs, int) or isinstance(num_packs, bool) or num_packs < 0:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(
                explain(
                    f"num_packs={num_packs!r} is no number of packs.",
                    expected="a whole number, or 0 to send every gradient by itself.",
                    fix="leave it out, or pass 1.",
                )
            )
        self.num_packs = num_packs

    def __repr__(self) -> str:
        return f"{type(self).__name__}(num_packs={self.num_packs})"

    def all_reduce(self, topology: Topology) -> AllReduce:
        """Returns the all-reduce of a step on some devices."""
        packing = NumberedPacks(self.num_packs) if self.num_packs else NO_PACKING
        return ChosenAllReduce(ReplicaAxis.of(topology), Choice(self._algorithm), packing)


class RingAllReduce(AlgorithmicOps):
    """Sums around a ring of the replicas: the fewest bytes per replica.

    Args:
        num_packs: number of messages to pack gradients into; 0 for one per gradient.

    Raises:
        ValueError: a negative `num_packs`.

    Example:
        >>> strategy = sg.MirroredStrategy(
        ...     ["cpu:0", "cpu:1"], cross_device_ops=sg.RingAllReduce()
        ... )

    Source: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms, 2009.
    """

    _algorithm = Algorithm.RING


class HierarchicalCopyAllReduce(AlgorithmicOps):
    """Sums inside groups of replicas, then between groups, then sends the sums back.

    A group is a TPU slice; without slices, a process; and in a single process with at least four
    devices, the first or second half of them.

    Args:
        num_packs: number of messages to pack gradients into; 0 for one per gradient.

    Raises:
        ValueError: a negative `num_packs`.

    Example:
        >>> ops = sg.HierarchicalCopyAllReduce()
        >>> strategy = sg.MirroredStrategy([f"cpu:{n}" for n in range(4)], cross_device_ops=ops)
        >>> strategy.run(lambda: sg.get_replica_context().all_reduce("sum", np.float32(1)))
        PerReplica[4.0 | 4.0 | 4.0 | 4.0]

    Source: TF 2.21 cross_device_ops.py, HierarchicalCopyAllReduce.
    """

    _algorithm = Algorithm.HIERARCHICAL


class NcclAllReduce(AlgorithmicOps):
    """Leaves sums to the compiler, which uses NCCL on GPUs.

    Args:
        num_packs: number of messages to pack gradients into; 0 for one per gradient. The compiler
            may combine them further.

    Raises:
        ValueError: a negative `num_packs`. The strategy raises it for devices that are not GPUs.

    Example:
        >>> try:
        ...     sg.MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops=sg.NcclAllReduce())
        ... except ValueError as error:
        ...     print(str(error).splitlines()[0])
        NcclAllReduce was given for devices of platform 'cpu'.

    Source: TF 2.21 cross_device_ops.py, NcclAllReduce.
    """

    def all_reduce(self, topology: Topology) -> AllReduce:
        """Returns the all-reduce of a step on some devices."""
        if topology.platform not in ("gpu", "cuda", "rocm"):
            raise ValueError(
                explain(
                    f"NcclAllReduce was given for devices of platform {topology.platform!r}.",
                    expected="GPUs: NCCL is for them only.",
                    fix="leave cross_device_ops out: the compiler takes what the devices have.",
                )
            )
        return super().all_reduce(topology)


class ReductionToOneDevice(BuiltInOps):
    """Gathers all values in one place and adds them there, in replica order.

    Args:
        reduce_to_device: name of a device. In a step all replicas gather and add, so that no result
            needs to be sent back.
        accumulation_fn: returns the sum of a list of all replicas' values; None adds.

    Raises:
        ValueError: an unknown device.

    Example:
        >>> ops = sg.ReductionToOneDevice(accumulation_fn=lambda parts: parts[0] * 10 + parts[1])
        >>> strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops=ops)
        >>> def step():
        ...     context = sg.get_replica_context()
        ...     return context.all_reduce("sum", context.replica_id_in_sync_group + 1)
        >>> strategy.run(step)
        PerReplica[12 | 12]

    Source: TF 2.21 cross_device_ops.py, ReductionToOneDevice.
    """

    def __init__(
        self,
        reduce_to_device: DeviceLike | None = None,
        accumulation_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        if reduce_to_device is not None:
            find_devices([reduce_to_device])
        self.is_built_in = accumulation_fn is None
        self.reduce_to_device = reduce_to_device
        self.accumulation_fn = accumulation_fn

    def all_reduce(self, topology: Topology) -> AllReduce:
        """Returns the all-reduce of a step on some devices."""
        axis = ReplicaAxis.of(topology)
        if self.accumulation_fn is None:
            return ChosenAllReduce(axis, Choice(Algorithm.TO_ONE_DEVICE))
        return GatheredAllReduce(axis, self._accumulate)

    def _accumulate(self, op: ReduceOp, stacks: list[list[jax.Array]]) -> list[Any]:
        assert self.accumulation_fn is not None
        return [
            mean_of(jnp.asarray(self.accumulation_fn(parts)), op, len(parts)) for parts in stacks
        ]

    def reduce_implementation(
        self, reduce_op: ReduceOp, per_replica_value: object, destinations: object, options: object
    ) -> Any:
        """Combines one value."""
        value = per_replica_value
        if (
            self.accumulation_fn is None
            or not isinstance(value, PerReplica)
            or value.local is not None
        ):
            return super().reduce_implementation(reduce_op, value, destinations, options)
        parts = [jnp.asarray(reduction.movable(part)) for part in value.components]
        return Mirrored(self._accumulate(reduce_op, [parts])[0])


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
