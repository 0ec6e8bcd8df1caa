"""`CrossDeviceOps`: the base class of what combines the values of replicas."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

from stratagem.devices.collectives.all_reduce import AllReduce, GatheredAllReduce
from stratagem.devices.collectives.axis import ReplicaAxis
from stratagem.devices.compression import Compression
from stratagem.devices.finding import find_devices
from stratagem.devices.mesh import Topology
from stratagem.errors import explain
from stratagem.options import ReduceOp
from stratagem.variables.distributed import DistributedValues, Mirrored, PerReplica


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

    def advice(self, shapes: Sequence[tuple[int, ...]], num_replicas: int) -> list[str]:
        """Returns lines for a description of gradients of some shapes; internal to this library.

        Args:
            shapes: shapes of the gradients that replicas sum.
            num_replicas: number of replicas.
        """
        del shapes, num_replicas
        return []

    def all_reduce(self, topology: Topology) -> AllReduce:
        """Returns the all-reduce of a step on some devices; internal to this library.

        Args:
            topology: the devices.
        """
        return GatheredAllReduce(ReplicaAxis.of(topology), self._combine)

    def _combine(self, op: ReduceOp, stacks: list[list[jax.Array]]) -> list[Any]:
        values = [PerReplica(stacked=jnp.stack(parts)) for parts in stacks]
        if len(values) == 1:
            return [_plain(self.reduce_implementation(op, values[0], values[0], None))]
        pairs = [(value, value) for value in values]
        return [_plain(result) for result in self.batch_reduce_implementation(op, pairs, None)]

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
                raise ValueError(
                    explain(
                        f"batch_reduce received {pair!r} among its pairs.",
                        expected="pairs (value, destinations).",
                        fix="write [(value, variable), ...].",
                    )
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


def _plain(result: object) -> Any:
    return result.value if isinstance(result, Mirrored) else result


def _check_value(value: object) -> None:
    if value is None or (isinstance(value, PerReplica) and value.objects == ()):
        raise ValueError(
            explain(
                f"reduce received {value!r} for a value.",
                expected="a PerReplica with a value for each replica.",
                fix="pass what strategy.run returned.",
            )
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
    raise ValueError(
        explain(
            f"destinations={destinations!r} is of type {type(destinations).__name__}.",
            expected="a variable, a distributed value, an array or a device.",
            fix="pass the variable that the result is for.",
        )
    )
