"""Logical devices: splitting and replicating a value over the devices of one replica."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from stratagem.contexts import StrategyParts
from stratagem.devices.mesh import Topology, prime_factors
from stratagem.errors import check_number, explain, invalid
from stratagem.execution.replica_context import get_replica_context
from stratagem.logs import warn_on_one_worker

# The Keras integration, a package above this one, sets its test for shape inference.
_infers_shapes: list[Callable[[], bool]] = [lambda: False]


def set_shape_inference(infers_shapes: Callable[[], bool]) -> None:
    """Registers the function that returns True while Keras only infers shapes."""
    _infers_shapes[:] = [infers_shapes]


class LogicalDevices(StrategyParts):
    """Methods of a strategy that place a value on the devices of a replica.

    In a compiled step they constrain the compiler, which divides the surrounding computation
    accordingly; results stay the same. An eager replica computes on its first device.
    """

    refuses_assignment = False  # True if the user asked for SPMD partitioning.

    def split_to_logical_devices(
        self, tensor: jax.typing.ArrayLike, partition_dimensions: Sequence[int]
    ) -> Any:
        """Splits a value over the devices of this replica. Call in replica context.

        Args:
            tensor: array of this replica.
            partition_dimensions: number of parts of each axis.

        Returns:
            The same value.

        Raises:
            ValueError: not one number per axis, their product is not the number of logical devices,
                or one does not divide its axis.
            RuntimeError: in cross-replica context.

        Example:
            >>> strategy = sg.MirroredStrategy([["cpu:0", "cpu:1"], ["cpu:2", "cpu:3"]])
            >>> def step():
            ...     rows = strategy.split_to_logical_devices(jax.numpy.ones((4, 6)), [2, 1])
            ...     return jax.numpy.sum(rows)
            >>> strategy.run(step)
            PerReplica[24.0 | 24.0]

        Source: TF 2.21 tpu_strategy.py, TPUStrategyV2.experimental_split_to_logical_devices.
        """
        _require_replica("split_to_logical_devices")
        count = self.topology.num_logical_devices
        shape, parts = jnp.shape(tensor), list(partition_dimensions)
        _check_parts(parts, shape, count)
        infers = _infers_shapes[0]()
        uneven = [axis for axis, part in enumerate(parts) if shape[axis] % part]
        if uneven and not infers:
            raise invalid(
                f"partition_dimensions={parts} divides axis {uneven[0]} of a value of shape "
                f"{shape} into parts of unequal size.",
                expected="numbers that divide the sizes.",
                fix="choose another axis, or another size.",
            )
        return tensor if infers else self._constrained(tensor, self._spec(parts))

    def replicate_to_logical_devices(self, tensor: object) -> Any:
        """Puts a whole copy of a value on each device of this replica. Call in replica context.

        Args:
            tensor: array of this replica.

        Returns:
            The same value.

        Raises:
            RuntimeError: in cross-replica context.

        Source: TF 2.21 tpu_strategy.py, TPUStrategyV2.experimental_replicate_to_logical_devices.
        """
        _require_replica("replicate_to_logical_devices")
        return tensor if _infers_shapes[0]() else self._constrained(tensor, PartitionSpec())

    def assign_to_logical_device(self, tensor: object, logical_device_id: int) -> Any:
        """Puts a value on a device of this replica and, unlike TensorFlow, on all others too.

        All devices run one program, so that no single device can compute alone: each gets a
        whole copy, as with `replicate_to_logical_devices`, and computes the rest. The
        results are the same, but neither memory nor time is saved; a warning says so. Call
        in replica context.

        Args:
            tensor: array of this replica.
            logical_device_id: number of the device in the replica.

        Returns:
            The same value.

        Raises:
            ValueError: the replica has no such device, or the strategy was created with SPMD
                partitioning.
            RuntimeError: in cross-replica context.

        Source: TF 2.21 tpu_strategy.py, TPUStrategyV2.experimental_assign_to_logical_device.
        """
        _require_replica("assign_to_logical_device")
        self._check_assignment(logical_device_id)
        if self.topology.num_logical_devices == 1 or _infers_shapes[0]():
            return tensor
        warn_on_one_worker(
            explain(
                "assign_to_logical_device puts a copy on every device of the replica.",
                expected="that what follows is computed by each of them.",
                fix="to divide the work, use split_to_logical_devices or layout_map.",
            ),
            stacklevel=2,
        )
        return self._constrained(tensor, PartitionSpec())

    experimental_assign_to_logical_device = assign_to_logical_device
    experimental_replicate_to_logical_devices = replicate_to_logical_devices
    experimental_split_to_logical_devices = split_to_logical_devices

    def _check_assignment(self, logical_device_id: int) -> None:
        if self.refuses_assignment:
            raise invalid(
                "assign_to_logical_device was called under SPMD partitioning.",
                expected="split_to_logical_devices or replicate_to_logical_devices there.",
                fix="call one of these, or leave experimental_spmd_xla_partitioning out.",
            )
        count = self.topology.num_logical_devices
        if logical_device_id not in range(count):
            raise invalid(
                f"logical_device_id={logical_device_id!r} in a replica of {count} logical devices.",
                expected=f"0 to {count - 1}.",
                fix="choose one of these, or make a strategy with larger groups of devices.",
            )

    def _spec(self, parts: Sequence[int]) -> PartitionSpec:
        """Maps each axis of a value to mesh axes whose sizes are the prime factors of its parts."""
        sizes = prime_factors(self.topology.num_logical_devices)
        free = list(zip(sizes, self.topology.logical_axes, strict=True))
        axes: list[tuple[str, ...]] = []
        for part in parts:
            taken: list[tuple[int, str]] = []
            for factor in prime_factors(part):
                pair = next(pair for pair in free if pair[0] == factor)
                free.remove(pair)
                taken.append(pair)
            axes.append(tuple(name for _, name in taken))
        return PartitionSpec(*[names or None for names in axes])

    def _constrained(self, tensor: object, spec: PartitionSpec) -> Any:
        settings: Any = jax.config
        if self.topology.num_logical_devices == 1 or settings.jax_disable_jit:
            return tensor
        mesh = jax.sharding.get_abstract_mesh()
        sharding = NamedSharding(self.topology.mesh if mesh.empty else mesh, spec)
        return jax.lax.with_sharding_constraint(jnp.asarray(tensor), sharding)


def _check_parts(parts: list[int], shape: tuple[int, ...], count: int) -> None:
    if len(parts) != len(shape) or math.prod(parts) != count or min(parts, default=1) < 1:
        raise invalid(
            f"partition_dimensions={parts} for a value of shape {shape} on {count} logical "
            "devices.",
            expected="a number for each axis, whose product is the number of logical devices.",
            fix="write 1 for axes that are not divided.",
        )


def checked_sequence_axis(axis: int | None, topology: Topology) -> int | None:
    """Returns the axis; raises a ValueError for the batch axis, or replicas of one device."""
    if axis is None:
        return None
    check_number("The strategy", sequence_axis=axis)
    if topology.num_logical_devices == 1:
        raise invalid(
            f"sequence_axis={axis} was given for replicas of one device.",
            expected="replicas of several devices, over which sequences are split.",
            fix="pass devices_per_replica=, too, or leave sequence_axis out.",
        )
    return axis


def _require_replica(method: str) -> None:
    if get_replica_context() is None and not _infers_shapes[0]():
        raise RuntimeError(
            explain(
                f"strategy.{method} was called in cross-replica context.",
                expected="replica context: it says where a value of one replica is.",
                fix="call it in the function given to strategy.run, or in a layer's call.",
            )
        )
