"""Methods of a strategy that create, combine and take apart distributed values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from stratagem import contexts as stack
from stratagem.contexts import StrategyParts
from stratagem.devices.context_mesh import outside_context_mesh
from stratagem.devices.private import uncommitted
from stratagem.options import ReduceOp, ValueContext
from stratagem.strategies.base import reduction
from stratagem.tracebacks import filters_traceback
from stratagem.variables.distributed import DistributedValues, PerReplica
from stratagem.variables.regrouping import is_per_replica, regroup, select_replica


class ValueMethods(StrategyParts):
    """Methods of a strategy that convert between distributed and ordinary values."""

    @filters_traceback
    def reduce(
        self,
        reduce_op: ReduceOp | str,
        value: object,
        axis: int | tuple[int, ...] | list[int] | None,
    ) -> Any:
        """Combines the parts of a value over replicas. Call in cross-replica context.

        Args:
            reduce_op: "sum" or "mean".
            value: pytree with `PerReplica` leaves.
            axis: None to reduce over replicas only; one or several ints to reduce over those axes
                of a component as well, where MEAN divides by the true number of elements.

        Returns:
            The pytree with ordinary arrays; SUM keeps the dtype, MEAN of integers is a float.

        Raises:
            ValueError: unknown op, axis out of range, or a SUM of a plain value over several
                replicas.
            TypeError: axis of another type.
            InvalidArgumentError: parts of unequal shapes with `axis=None`.
            RuntimeError: in replica context; use `all_reduce` or `merge_call`.

        Example:
            >>> strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> ids = strategy.run(lambda: sg.get_replica_context().replica_id_in_sync_group)
            >>> strategy.reduce("sum", ids, axis=None)
            Array(1, dtype=int32)

        Source: TF 2.21 distribute_lib.py, StrategyBase.reduce.
        """
        stack.require_cross_replica(
            self, "reduce", instead="use ReplicaContext.all_reduce, or call it in merge_call."
        )
        op = ReduceOp.parse(reduce_op)
        axes = reduction.parse_axes(axis)
        count = self.topology.num_replicas
        return _map(lambda leaf: reduction.reduce(op, leaf, axes, num_replicas=count), value)

    @filters_traceback
    def gather(self, value: object, axis: int) -> Any:
        """Concatenates the parts of a value in replica order. Call in cross-replica context.

        Args:
            value: pytree with `PerReplica` leaves, each part of shape (..., n_i, ...).
            axis: axis of a part, with -rank <= axis < rank.

        Returns:
            The pytree with ordinary arrays, size sum(n_i) at `axis`, true rows only; plain values
            unchanged.

        Raises:
            ValueError: rank 0, or axis out of range.
            InvalidArgumentError: parts whose ranks or other sizes differ.
            NotImplementedError: `IndexedSlices`.
            RuntimeError: in replica context; use `all_gather`.

        Example:
            >>> strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> value = strategy.distribute_values_from_function(lambda _: jax.numpy.ones(2))
            >>> strategy.gather(value, axis=0).shape
            (4,)

        Source: TF 2.21 distribute_lib.py, StrategyBase.gather.
        """
        stack.require_cross_replica(self, "gather", instead="use ReplicaContext.all_gather.")
        count = self.topology.num_replicas
        return _map(lambda leaf: reduction.gather(leaf, axis, num_replicas=count), value)

    concat = gather

    @filters_traceback
    def local_results(self, value: object) -> tuple[Any, ...]:
        """Returns the parts of a value that this process holds. Call in cross-replica context.

        Args:
            value: a `PerReplica`, a pytree with such leaves, or any other value.

        Returns:
            Tuple of its components, true rows only; for a pytree, one pytree per replica of this
            process; `(value,)` for a value that is not distributed. An array stays on its replica's
            device until it is used; then JAX moves it to where it is needed.

        Raises:
            RuntimeError: in replica context.

        Example:
            >>> strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> ids = strategy.run(lambda: sg.get_replica_context().replica_id_in_sync_group)
            >>> sum(strategy.local_results(ids))
            Array(1, dtype=int32)
            >>> strategy.local_results(7)
            (7,)

        Source: TF 2.21 distribute_lib.py, StrategyBase.experimental_local_results.
        """
        stack.require_cross_replica(
            self, "local_results", instead="use the value: it is this replica's."
        )
        if isinstance(value, PerReplica):
            return tuple(map(uncommitted, value.components))
        count = self.topology.num_local_replicas
        if isinstance(value, DistributedValues):
            return (value,) * count
        if not any(map(is_per_replica, jax.tree.leaves(value, is_leaf=is_per_replica))):
            return (value,)
        parts = [select_replica(index, value) for index in range(count)]
        return tuple(jax.tree.map(uncommitted, part) for part in parts)

    experimental_local_results = local_results

    @filters_traceback
    @outside_context_mesh
    def distribute_values_from_function(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        """Creates a distributed value from a function. Call in cross-replica context.

        Args:
            value_fn: called once per replica of this process with a `ValueContext`; returns a
                pytree.

        Returns:
            The pytree with `PerReplica` leaves; plain with one replica.

        Raises:
            ValueError: the pytrees differ in structure.
            RuntimeError: in replica context.

        Example:
            >>> strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
            >>> strategy.distribute_values_from_function(lambda c: 10 * c.replica_id_in_sync_group)
            PerReplica[0 | 10]

        Source: TF 2.21 distribute_lib.py, experimental_distribute_values_from_function.
        """
        stack.require_cross_replica(
            self,
            "distribute_values_from_function",
            instead="compute the value in the replica function.",
        )
        count = self.topology.num_replicas
        ids = self.topology.local_replica_ids
        values = [value_fn(ValueContext(index, count)) for index in ids]
        if count > 1:  # Equal numbers must make a PerReplica too, regardless of their values.
            values = jax.tree.map(_number_as_array, values)
        return regroup(values, self.topology)

    experimental_distribute_values_from_function = distribute_values_from_function


def _map(fn: Callable[[Any], Any], value: object) -> Any:
    return jax.tree.map(fn, value, is_leaf=reduction.is_leaf)


def _number_as_array(leaf: object) -> Any:
    is_number = isinstance(leaf, int | float | complex) and not isinstance(leaf, bool)
    return np.asarray(leaf) if is_number else leaf
