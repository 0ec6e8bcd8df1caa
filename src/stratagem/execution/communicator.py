"""`Communicator`: collectives of one replica, in compiled, eager and single-replica execution."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from stratagem.devices.collectives import device
from stratagem.devices.collectives.all_reduce import AllReduce, ChosenAllReduce, marked_as_sum
from stratagem.devices.collectives.packing import NO_PACKING
from stratagem.errors import explain
from stratagem.options import ReduceOp
from stratagem.variables.distributed import Mirrored, PerReplica
from stratagem.variables.indexed_slices import IndexedSlices
from stratagem.variables.regrouping import is_array

if TYPE_CHECKING:
    from stratagem.contexts import StrategyParts


class Communicator(abc.ABC):
    """Combines arrays over the replicas of a step, as seen from one replica.

    Example:
        >>> strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> def step(x):
        ...     communicator = sg.get_replica_context().communicator
        ...     return communicator.all_reduce(sg.ReduceOp.SUM, x * communicator.num_replicas)
        >>> strategy.run(step, args=(np.float32(3),))
        PerReplica[12.0 | 12.0]

    Source: TF 2.21 distribute_lib.py, ReplicaContext.
    """

    @property
    @abc.abstractmethod
    def num_replicas(self) -> int:
        """Number of replicas of the step."""

    @abc.abstractmethod
    def all_reduce(self, op: ReduceOp, value: object) -> Any:
        """Returns the sum or mean over replicas; every replica must call it."""

    def all_reduce_many(self, op: ReduceOp, values: Sequence[Any]) -> list[Any]:
        """Returns the sum or mean of each value over replicas, packed into few messages."""
        return [self.all_reduce(op, value) for value in values]

    @abc.abstractmethod
    def all_gather(self, value: object, axis: int, lengths: tuple[int, ...] | None) -> Any:
        """Returns the concatenation along `axis` over replicas; every replica must call it."""

    @abc.abstractmethod
    def all_to_all(self, value: jax.Array) -> jax.Array:
        """Returns row r of replica i as row i of replica r; every replica must call it.

        `value` has a row for each replica, shape (num_replicas, ...). Not differentiable.
        """

    def all_reduce_slices(self, op: ReduceOp, slices: IndexedSlices) -> IndexedSlices:
        """Returns the rows of all replicas, in replica order; rows of equal index stay separate."""
        slices.check()
        values = self.all_gather(slices.values, 0, None)
        if op is ReduceOp.MEAN:
            values = values / self.num_replicas
        return IndexedSlices(values, self.all_gather(slices.indices, 0, None), slices.dense_shape)

    @abc.abstractmethod
    def among(self, groups: tuple[tuple[int, ...], ...], *, packs: bool = False) -> Communicator:
        """Returns the communicator of this replica's group.

        `groups` are of equal size and have each replica once. Every replica must call what it
        offers, whatever its group. With `packs`, many values are packed as between all replicas.
        """

    @abc.abstractmethod
    def merge(
        self,
        strategy: StrategyParts,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Calls `fn` once for all replicas, in cross-replica context."""


class SoleCommunicator(Communicator):
    """The communicator of a single replica: nothing to combine.

    With `marks_sums`, the trace marks where values would be combined, so that the update after
    those sums can run elsewhere.

    Example:
        >>> communicator = sg.collectives.SoleCommunicator()
        >>> communicator.num_replicas, communicator.all_reduce(sg.ReduceOp.SUM, 3.0)
        (1, 3.0)

    Source: specific to Stratagem.
    """

    def __init__(self, *, marks_sums: bool = False) -> None:
        self._note = marked_as_sum if marks_sums else _identity

    @property
    def num_replicas(self) -> int:
        """One."""
        return 1

    def all_reduce(self, op: ReduceOp, value: object) -> Any:
        """Returns the value, in the dtype that several replicas would return."""
        array = jnp.asarray(value)
        if op is ReduceOp.MEAN and not jnp.issubdtype(array.dtype, jnp.inexact):
            return self._note(jnp.true_divide(array, jnp.ones_like(array)))
        if array.dtype == bool:
            array = array.astype(jnp.int32)
        return self._note(value if isinstance(value, int | float | complex | np.generic) else array)

    def all_gather(self, value: object, axis: int, lengths: tuple[int, ...] | None) -> Any:
        """Returns the true rows of the value."""
        value = jnp.asarray(value)
        if lengths is not None:
            value = jax.lax.slice_in_dim(value, 0, lengths[0], axis=axis)
        return self._note(value)

    def all_to_all(self, value: jax.Array) -> jax.Array:
        """Returns the value, which has a single row."""
        return value

    def among(self, groups: tuple[tuple[int, ...], ...], *, packs: bool = False) -> Communicator:
        """Returns itself: the only group is that of the only replica."""
        return self

    def merge(
        self,
        strategy: StrategyParts,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Calls `fn` with plain values."""
        result = fn(strategy, *args, **kwargs)
        return jax.tree.map(_without_mirrored, result, is_leaf=_is_distributed)


class MeshCommunicator(Communicator):
    """The communicator of a compiled step: collectives over a mesh axis.

    Example:
        >>> axis = sg.collectives.ReplicaAxis("replica", 2)
        >>> communicator = sg.collectives.MeshCommunicator(sg.collectives.ChosenAllReduce(axis))
        >>> def step(x):
        ...     return communicator.all_reduce(sg.ReduceOp.MEAN, x)
        >>> jax.vmap(step, axis_name="replica")(np.float32([1, 3])).tolist()
        [2.0, 2.0]

    Source: specific to Stratagem.
    """

    def __init__(self, all_reduce: AllReduce) -> None:
        self._all_reduce = all_reduce
        self._axis_name = all_reduce.axis.name
        self._groups = all_reduce.axis.index_groups

    @property
    def num_replicas(self) -> int:
        """Size of the replica axis."""
        return self._all_reduce.axis.size

    def all_reduce(self, op: ReduceOp, value: object) -> Any:
        """Combines a value over the mesh axis."""
        return self._all_reduce.one(op, value)

    def all_reduce_many(self, op: ReduceOp, values: Sequence[Any]) -> list[Any]:
        """Combines values over the mesh axis, packed into few messages."""
        return self._all_reduce.many(op, values)

    def all_gather(self, value: object, axis: int, lengths: tuple[int, ...] | None) -> Any:
        """Concatenates over the mesh axis."""
        return device.all_gather(value, axis, self._axis_name, lengths, self._groups)

    def all_to_all(self, value: jax.Array) -> jax.Array:
        """Exchanges rows over the mesh axis."""
        return jax.lax.all_to_all(
            value, self._axis_name, split_axis=0, concat_axis=0, axis_index_groups=self._groups
        )

    def among(self, groups: tuple[tuple[int, ...], ...], *, packs: bool = False) -> Communicator:
        """Returns the communicator of this replica's group, whose sums are the compiler's."""
        if len(groups[0]) == 1:
            return SoleCommunicator()
        axis = dataclasses.replace(
            self._all_reduce.axis, size=len(groups[0]), groups=(), apart=groups
        )
        packing = NO_PACKING
        if packs and isinstance(self._all_reduce, ChosenAllReduce):
            packing = self._all_reduce.packing
        return MeshCommunicator(ChosenAllReduce(axis, packing=packing))

    def merge(
        self,
        strategy: StrategyParts,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Calls `fn` while the step is traced; its PerReplica arguments hold the local value."""
        view_args, view_kwargs = jax.tree.map(
            _as_local_per_replica, (args, kwargs), is_leaf=_is_distributed
        )
        result = fn(strategy, *view_args, **view_kwargs)
        return jax.tree.map(self._local_component, result, is_leaf=_is_distributed)

    def _local_component(self, leaf: object) -> Any:
        if not isinstance(leaf, PerReplica):
            return _without_mirrored(leaf)
        if leaf.objects is not None:
            raise ValueError(
                explain(
                    f"The function passed to merge_call returned {leaf}, with Python objects.",
                    expected="arrays of one shape and dtype for one compiled program.",
                    fix="return arrays, or debug with sg.config.run_eagerly(True).",
                )
            )
        if leaf.stacked is None:
            return leaf.local
        return jnp.asarray(leaf.stacked)[jax.lax.axis_index(self._axis_name)]


def _as_local_per_replica(leaf: object) -> Any:
    return PerReplica(local=leaf) if is_array(leaf) else leaf


def _identity(value: object) -> Any:
    return value


def _is_distributed(leaf: object) -> bool:
    return isinstance(leaf, PerReplica | Mirrored)


def _without_mirrored(leaf: object) -> Any:
    return leaf.value if isinstance(leaf, Mirrored) else leaf
