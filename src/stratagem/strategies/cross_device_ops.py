"""Cross-device ops: how a strategy combines the values of replicas.

Ops make the communicator of a step for their devices; outside of steps they combine values
themselves. A user's own ops get the values of all replicas in both.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

from stratagem.devices.all_reduce import (
    NO_PACKING,
    Algorithm,
    NumberedPacks,
    ReplicaAxis,
    algorithm_for,
    mean_of,
    packing_for,
)
from stratagem.devices.communication import CommunicationImplementation, CommunicationOptions
from stratagem.devices.compression import Compression
from stratagem.devices.device_assignment import num_slices
from stratagem.devices.finding import DeviceLike, find_devices
from stratagem.devices.mesh import Topology
from stratagem.devices.shared_sums import is_connected
from stratagem.errors import check_number, invalid
from stratagem.execution.communicator import MeshCommunicator
from stratagem.options import ReduceOp
from stratagem.strategies import reduction
from stratagem.variables.distributed import (
    DistributedValues,
    Mirrored,
    PerReplica,
    without_mirrored,
)


class CrossDeviceOps(abc.ABC):
    """Combines the values of replicas; passed to a strategy, it combines gradients.

    A subclass overrides `reduce_implementation` and, if many values are better combined together,
    `batch_reduce_implementation`. They are called with the values of all replicas: while a step is
    traced, and by `strategy.extended.reduce_to` outside of steps.

    Example:
        >>> class Largest(sg.CrossDeviceOps):
        ...     def reduce_implementation(self, reduce_op, value, destinations, options):
        ...         return jnp.max(jnp.stack(value.components), axis=0)
        >>> strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops=Largest())
        >>> def step():
        ...     context = sg.get_replica_context()
        ...     return context.all_reduce("sum", context.replica_id_in_sync_group + 10)
        >>> strategy.run(step)
        PerReplica[11 | 11]

    Source: TF 2.21 cross_device_ops.py, CrossDeviceOps.
    """

    is_built_in = False

    @property
    def compression(self) -> Compression | None:
        """Lossy form in which gradients are sent; None sends them whole."""
        return None

    def communicator(self, topology: Topology) -> MeshCommunicator:
        """Returns the communicator of a step on some devices; internal to this library.

        Args:
            topology: the devices.
        """
        return MeshCommunicator(ReplicaAxis.of(topology), combine=self._combine)

    def _combine(self, op: ReduceOp, stacks: list[list[jax.Array]]) -> list[Any]:
        values = [PerReplica(stacked=jnp.stack(parts)) for parts in stacks]
        if len(values) == 1:
            return [without_mirrored(self.reduce_implementation(op, values[0], values[0], None))]
        pairs = [(value, value) for value in values]
        return [
            without_mirrored(result) for result in self.batch_reduce_implementation(op, pairs, None)
        ]

    def reduce(
        self,
        reduce_op: ReduceOp | str,
        per_replica_value: object,
        destinations: object,
        options: object = None,
    ) -> Any:
        """Combines one value over all replicas. Call in cross-replica context.

        Args:
            reduce_op: "sum" or "mean".
            per_replica_value: `PerReplica`; a plain value is one replica's.
            destinations: where to put the result: a variable, a distributed value, an array or a
                device.
            options: `CommunicationOptions`, passed to the implementation.

        Returns:
            `Mirrored`.

        Raises:
            ValueError: no value, no destinations or unknown ones, an unknown op.

        Example:
            >>> strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> value = strategy.run(lambda: sg.get_replica_context().replica_id_in_sync_group)
            >>> int(sg.ReductionToOneDevice().reduce("sum", value, "cpu:0"))
            1

        Source: TF 2.21 cross_device_ops.py, CrossDeviceOps.reduce.
        """
        op = ReduceOp.parse(reduce_op)
        _check_value(per_replica_value)
        _check_destinations(destinations)
        result = self.reduce_implementation(op, per_replica_value, destinations, options)
        return result if isinstance(result, Mirrored) else Mirrored(result)

    def batch_reduce(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Iterable[tuple[Any, Any]],
        options: object = None,
    ) -> list[Any]:
        """Combines many values over all replicas. Call in cross-replica context.

        Args:
            reduce_op: "sum" or "mean".
            value_destination_pairs: pairs of `per_replica_value` and `destinations`, as for
                `reduce`.
            options: as for `reduce`.

        Returns:
            A list of `Mirrored`.

        Raises:
            ValueError: as for `reduce`, or an element that is not a pair.

        Source: TF 2.21 cross_device_ops.py, CrossDeviceOps.batch_reduce.
        """
        op = ReduceOp.parse(reduce_op)
        pairs = list(value_destination_pairs)
        for pair in pairs:
            if not isinstance(pair, tuple | list) or len(pair) != 2:  # pyright: ignore[reportUnnecessaryIsInstance]
                raise invalid(
                    f"batch_reduce received {pair!r} among its pairs.",
                    expected="pairs (value, destinations).",
                    fix="write [(value, variable), ...].",
                )
            _check_value(pair[0])
            _check_destinations(pair[1])
        results = self.batch_reduce_implementation(op, pairs, options)
        return [one if isinstance(one, Mirrored) else Mirrored(one) for one in results]

    def broadcast(self, tensor: object, destinations: object) -> Any:
        """Gives every replica the same value. Call in cross-replica context.

        Args:
            tensor: array.
            destinations: as for `reduce`.

        Returns:
            `Mirrored`.

        Raises:
            ValueError: no destinations or unknown ones.

        Source: TF 2.21 cross_device_ops.py, CrossDeviceOps.broadcast.
        """
        _check_destinations(destinations)
        return self.broadcast_implementation(tensor, destinations)

    @abc.abstractmethod
    def reduce_implementation(
        self, reduce_op: ReduceOp, per_replica_value: object, destinations: object, options: object
    ) -> Any:
        """Combines one value; its `components` are the values of all replicas, in order."""

    def batch_reduce_implementation(
        self, reduce_op: ReduceOp, value_destination_pairs: Sequence[Any], options: object
    ) -> Sequence[Any]:
        """Combines several values; by default one after the other."""
        return [
            self.reduce_implementation(reduce_op, value, destinations, options)
            for value, destinations in value_destination_pairs
        ]

    def broadcast_implementation(self, tensor: object, destinations: object) -> Any:
        """Gives every replica the same value."""
        return tensor if isinstance(tensor, Mirrored) else Mirrored(tensor)


def _check_value(value: object) -> None:
    if value is None or (isinstance(value, PerReplica) and value.objects == ()):
        raise invalid(
            f"reduce received {value!r} for a value.",
            expected="a PerReplica with a value for each replica.",
            fix="pass what strategy.run returned.",
        )


def _check_destinations(destinations: object) -> None:
    if destinations is None or (isinstance(destinations, str | list | tuple) and not destinations):
        _refuse(destinations)
    if isinstance(destinations, str):
        find_devices([destinations])
    elif not (
        isinstance(destinations, DistributedValues | jax.Device | jax.Array)
        or hasattr(destinations, "assign")
    ):
        _refuse(destinations)


def _refuse(destinations: object) -> NoReturn:
    raise invalid(
        f"destinations={destinations!r} is of type {type(destinations).__name__}.",
        expected="a variable, a distributed value, an array or a device.",
        fix="pass the variable that the result is for.",
    )


# This library's cross-device ops: one class for each algorithm that has a name in TensorFlow.

_NAMED: Mapping[CommunicationImplementation | str, Algorithm] = {
    CommunicationImplementation.RING: Algorithm.RING,
    CommunicationImplementation.HIERARCHICAL: Algorithm.HIERARCHICAL,
    CommunicationImplementation.TWO_STAGE: Algorithm.TWO_STAGE,
    CommunicationImplementation.NCCL: Algorithm.COMPILER,
}


class AutomaticOps(CrossDeviceOps):
    """Combines values by the communication options; the base of this library's ops.

    Args:
        options: the user's options.
        between_processes: True to choose the algorithm between processes on CPU, too, if
            `options.implementation` is AUTO; False for the compiler's.
    """

    is_built_in = True

    def __init__(
        self, options: CommunicationOptions | None = None, *, between_processes: bool = False
    ) -> None:
        self.options = options or CommunicationOptions()
        self._between_processes = between_processes

    @property
    def compression(self) -> Compression | None:
        """The compression of the options."""
        compression = self.options.compression
        assert not isinstance(compression, str)  # the options have parsed it
        return compression

    def communicator(self, topology: Topology) -> MeshCommunicator:
        """Returns the communicator of a step on some devices.

        If replicas have several devices, it adds by the compiler's own sum, which keeps shards
        apart; packing or splitting arrays would gather them first.
        """
        axis = ReplicaAxis.of(topology)
        if topology.groups is not None:
            return MeshCommunicator(axis)
        rule = functools.partial(
            algorithm_for,
            platform=topology.platform,
            num_replicas=topology.num_replicas,
            num_slices=num_slices(topology.devices or ()),
            spans_processes=topology.spans_processes and self._between_processes,
            shares_memory=is_connected(topology),
        )
        packing = packing_for(
            topology.platform,
            spans_processes=topology.spans_processes,
            bytes_per_pack=self.options.bytes_per_pack,
        )
        in_bfloat16 = self.options.reduction_dtype == "bfloat16"
        algorithm = _NAMED.get(self.options.implementation, rule)
        return MeshCommunicator(axis, algorithm, packing, in_bfloat16=in_bfloat16)

    def reduce_implementation(
        self, reduce_op: ReduceOp, per_replica_value: object, destinations: object, options: object
    ) -> Any:
        """Combines one value."""
        value = per_replica_value
        if isinstance(value, PerReplica) and value.local is not None:
            topology = reduction.merge_context().strategy.topology
            return Mirrored(self.communicator(topology).all_reduce(reduce_op, value.local))
        count = 1
        if isinstance(value, PerReplica):
            count = len(value.objects or ()) if value.stacked is None else value.stacked.shape[0]
        return Mirrored(reduction.reduce(reduce_op, value, None, num_replicas=count))


class AlgorithmicOps(AutomaticOps):
    """One algorithm for all sizes.

    Args:
        num_packs: number of messages to pack gradients into; 0 for one per gradient.

    Raises:
        ValueError: `num_packs` is negative or not a number.
    """

    _algorithm = Algorithm.COMPILER

    def __init__(self, num_packs: int = 1) -> None:
        check_number(type(self).__name__, 0, num_packs=num_packs)
        super().__init__()
        self.num_packs = num_packs

    def __repr__(self) -> str:
        return f"{type(self).__name__}(num_packs={self.num_packs})"

    def communicator(self, topology: Topology) -> MeshCommunicator:
        """Returns the communicator of a step on some devices."""
        packing = NumberedPacks(self.num_packs) if self.num_packs else NO_PACKING
        return MeshCommunicator(ReplicaAxis.of(topology), self._algorithm, packing)


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

    def communicator(self, topology: Topology) -> MeshCommunicator:
        """Returns the communicator of a step on some devices."""
        if topology.platform not in ("gpu", "cuda", "rocm"):
            raise invalid(
                f"NcclAllReduce was given for devices of platform {topology.platform!r}.",
                expected="GPUs: NCCL is for them only.",
                fix="leave cross_device_ops out: the compiler takes what the devices have.",
            )
        return super().communicator(topology)


class ReductionToOneDevice(AutomaticOps):
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
        super().__init__()
        self.is_built_in = accumulation_fn is None
        self.reduce_to_device = reduce_to_device
        self.accumulation_fn = accumulation_fn

    def communicator(self, topology: Topology) -> MeshCommunicator:
        """Returns the communicator of a step on some devices."""
        axis = ReplicaAxis.of(topology)
        if self.accumulation_fn is None:
            return MeshCommunicator(axis, Algorithm.TO_ONE_DEVICE)
        return MeshCommunicator(axis, combine=self._accumulate)

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
        super().__init__(CommunicationOptions(compression=compression))

    def __repr__(self) -> str:
        return f"CompressedAllReduce({self.compression})"
