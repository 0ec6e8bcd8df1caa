"""`strategy.extended`: methods for authors of optimizers, layers and metrics."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import jax

from stratagem import contexts as stack
from stratagem.devices.mesh import outside_context_mesh
from stratagem.errors import check_type, explain, invalid
from stratagem.options import ReduceOp
from stratagem.strategies import reduction
from stratagem.variables.distributed import Mirrored, PerReplica, is_distributed, without_mirrored
from stratagem.variables.placement import sole_device
from stratagem.variables.registry import home_of

if TYPE_CHECKING:
    from stratagem.strategies.strategy import Strategy


class StrategyExtended:
    """Extended interface of a strategy, for authors of libraries; not meant for subclassing.

    Args:
        strategy: the strategy.

    Example:
        >>> strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> with strategy.scope():
        ...     total = sg.Variable(1.0)
        ...     _ = strategy.extended.update(total, lambda one, x: one.assign_add(x), (2.0,))
        >>> float(total.value), len(strategy.extended.worker_devices)
        (3.0, 2)

    Source: TF 2.21 distribute_lib.py, StrategyExtendedV2.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy

    @property
    def worker_devices(self) -> tuple[jax.Device, ...]:
        """Devices of this process's replicas, in replica order."""
        return self._devices("worker_devices")

    @property
    def parameter_devices(self) -> tuple[jax.Device, ...]:
        """Devices of the variables: those of the replicas, or the one of central storage."""
        devices = self._devices("parameter_devices")
        device = sole_device(self._strategy.placement)
        return devices if device is None else (device,)

    @property
    def experimental_require_static_shapes(self) -> bool:
        """True: steps are compiled for fixed shapes."""
        return True

    def _devices(self, name: str) -> tuple[jax.Device, ...]:
        devices = self._strategy.topology.local_devices
        if devices is None:
            raise RuntimeError(
                explain(
                    f"{name} was asked of the default strategy.",
                    expected="a strategy that was made for devices.",
                    fix='make one, for example sg.OneDeviceStrategy("cpu:0").',
                )
            )
        return devices

    def reduce_to(
        self, reduce_op: ReduceOp | str, value: object, destinations: object, options: object = None
    ) -> Any:
        """Reduces a value and puts the result on the device of a variable.

        Call in cross-replica context.

        Args:
            reduce_op: "sum" or "mean".
            value: `PerReplica`, or a pytree of them.
            destinations: a variable, a distributed value or a device.
            options: passed to custom cross-device ops.

        Returns:
            `Mirrored`.

        Raises:
            ValueError: unknown op, or a list as destination.
            RuntimeError: in replica context.

        Source: TF 2.21 distribute_lib.py, StrategyExtendedV2.reduce_to.
        """
        stack.require_cross_replica(
            self._strategy, "extended.reduce_to", instead="call it in merge_call."
        )
        op = ReduceOp.parse(reduce_op)
        if isinstance(destinations, list | tuple):
            raise invalid(
                f"reduce_to received destinations of type {type(destinations).__name__}.",
                expected="one variable, one distributed value or one device.",
                fix="call it once a destination, or use batch_reduce_to.",
            )
        count = self._strategy.num_replicas_in_sync
        ops = self._strategy.cross_device_ops

        def reduce(leaf: object) -> Any:
            if isinstance(leaf, PerReplica) and leaf.local is None and not ops.is_built_in:
                own_reduce = outside_context_mesh(ops.reduce)
                return own_reduce(op, reduction.of_all(leaf, count), destinations, options)
            return Mirrored(reduction.reduce(op, leaf, None, num_replicas=count))

        return jax.tree.map(reduce, value, is_leaf=reduction.is_leaf)

    def batch_reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Iterable[tuple[Any, Any]],
        options: object = None,
    ) -> list[Any]:
        """Reduces many values at once. Call in cross-replica context.

        Args:
            reduce_op: "sum" or "mean".
            value_destination_pairs: pairs of `value` and `destinations`, as for `reduce_to`.
            options: ignored; accepted for compatibility with TensorFlow.

        Returns:
            List of `Mirrored`, in the order of the pairs.

        Raises:
            ValueError: unknown op, or a list as destination.
            RuntimeError: in replica context.

        Source: TF 2.21 distribute_lib.py, StrategyExtendedV2.batch_reduce_to.
        """
        return [
            self.reduce_to(reduce_op, value, where, options)
            for value, where in value_destination_pairs
        ]

    def broadcast_to(self, tensor: object, destinations: object) -> Any:
        """Gives every replica the same value. Call in cross-replica context.

        Args:
            tensor: array.
            destinations: ignored: a mirrored value is on all devices of the strategy.

        Returns:
            `Mirrored`.

        Raises:
            RuntimeError: in replica context.

        Source: TF 2.21 distribute_lib.py, StrategyExtendedV1.broadcast_to.
        """
        stack.require_cross_replica(
            self._strategy, "extended.broadcast_to", instead="use the value: every replica has it."
        )
        return Mirrored(tensor)

    @outside_context_mesh
    def update(
        self,
        var: object,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Runs a function on a variable where it is stored, without aggregation.

        Call in cross-replica context.

        Args:
            var: a variable of this strategy.
            fn: called as `fn(variable, *args, **kwargs)`; its assignments apply to every copy.
            args: plain or `Mirrored` arguments.
            kwargs: keyword arguments, likewise.
            group: True returns one result; False returns a tuple with one per copy.

        Returns:
            The result of `fn`.

        Raises:
            TypeError: a `PerReplica` argument, which would make the copies diverge.
            RuntimeError: in replica context.

        Example:
            >>> with (strategy := sg.MirroredStrategy(["cpu:0", "cpu:1"])).scope():
            ...     v = keras.Variable(1.0)
            >>> strategy.extended.update(v, lambda v, x: v.assign_add(x), args=(3.0,))
            Array(4., dtype=float32)

        Source: TF 2.21 distribute_lib.py, StrategyExtendedV2.update.
        """
        stack.require_cross_replica(
            self._strategy, "extended.update", instead="call it in merge_call."
        )
        plain_args, plain_kwargs = _plain_arguments(tuple(args), kwargs or {})
        frame = stack.current_frame()
        with stack.push(stack.FrameKind.UPDATE, self._strategy, frame.replica if frame else None):
            result = fn(var, *plain_args, **plain_kwargs)
        is_sole = sole_device(self._strategy.placement) is not None
        num_copies = 1 if is_sole else self._strategy.topology.num_local_replicas
        return result if group else (result,) * num_copies

    @contextlib.contextmanager
    def colocate_vars_with(self, var: object) -> Generator[None]:
        """Creates variables on the devices of another one. Call in cross-replica context.

        Args:
            var: a variable of this strategy.

        Raises:
            ValueError: not a variable of this strategy.
            RuntimeError: in replica context.

        Source: TF 2.21 distribute_lib.py, StrategyExtendedV2.colocate_vars_with.
        """
        if not self.variable_created_in_scope(var):
            raise invalid(
                f"colocate_vars_with received {var!r}, which does not belong to {self._strategy}.",
                expected="a variable that was created in this strategy's scope.",
                fix="create it in `with strategy.scope():`.",
            )
        with self._strategy.scope():
            yield

    def variable_created_in_scope(self, v: object) -> bool:
        """Returns True if a variable belongs to this strategy. Call anywhere.

        Args:
            v: a Keras variable.

        Returns:
            True if it was created in this strategy's scope; for the default strategy, outside every
            scope.

        Raises:
            TypeError: not a variable.

        Source: TF 2.21 distribute_lib.py, StrategyExtendedV2.variable_created_in_scope.
        """
        check_type(
            "v",
            v,
            lambda one: hasattr(one, "assign"),
            "a keras.Variable",
            "pass the variable itself, not its value.",
            owner="variable_created_in_scope",
        )
        home = home_of(v)
        if home is None:
            return self._strategy.topology.devices is None
        return home.strategy is self._strategy

    def value_container(self, value: object) -> Any:
        """Returns the distributed value that a component belongs to. Call anywhere.

        Args:
            value: a variable or a value.

        Returns:
            The value itself: a variable of a strategy is one object for all its copies.

        Source: TF 2.21 distribute_lib.py, StrategyExtendedV2.value_container.
        """
        return value


def _plain_arguments(args: tuple[Any, ...], kwargs: Any) -> tuple[Any, Any]:
    """Returns the arguments of an update, which must be equal for all copies."""
    leaves = jax.tree.leaves((args, kwargs), is_leaf=is_distributed)
    if any(isinstance(leaf, PerReplica) for leaf in leaves):
        raise TypeError(
            explain(
                "extended.update received a PerReplica argument.",
                expected="plain or Mirrored values: each copy must take the same update.",
                fix="reduce it first: strategy.extended.reduce_to(op, value, variable).",
            )
        )
    return jax.tree.map(without_mirrored, (args, kwargs), is_leaf=is_distributed)
