"""`Communicator`: collectives of one replica, in compiled, eager and single-replica execution."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from stratagem.devices.collectives.all_reduce import (
    NO_PACKING,
    Algorithm,
    GradientPacking,
    ReplicaAxis,
    marked_as_sum,
    mean_of,
    rounded_sum,
    shared_sum,
    sum_over_replicas,
)
from stratagem.devices.collectives.shared_sums import DTYPES
from stratagem.errors import explain
from stratagem.options import ReduceOp
from stratagem.variables.distributed import Mirrored, PerReplica, is_array
from stratagem.variables.indexed_slices import IndexedSlices

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


@dataclasses.dataclass(frozen=True)
class MeshCommunicator(Communicator):
    """The communicator of a compiled step: collectives over a mesh axis.

    It is for `jax.shard_map` with `check_vma=False`, where the transpose of a sum over replicas is
    again a sum over replicas: the gradient that `tf.distribute` defines. Eager replicas combine by
    its `parts`.

    Args:
        axis: the axis of the replicas.
        algorithm: the algorithm of sums, or a function of an array's bytes that returns it; called
            with `shares_memory=False`, it returns one that needs no order of the sums.
        packing: how many arrays are packed into messages.
        in_bfloat16: True to send float32 gradients as bfloat16.
        combine: combines arrays in place of sums. It receives the op and, for each value, a list of
            the arrays of all replicas, and returns one result per value. None adds.

    Example:
        >>> axis = sg.collectives.ReplicaAxis("replica", 2)
        >>> communicator = sg.collectives.MeshCommunicator(axis, sg.collectives.Algorithm.RING)
        >>> def step(x):
        ...     return communicator.all_reduce(sg.ReduceOp.MEAN, x)
        >>> jax.vmap(step, axis_name="replica")(np.float32([1, 3])).tolist()
        [2.0, 2.0]

    Source: JAX, jax.lax.psum; TF 2.21 cross_device_ops.py, CrossDeviceOps.
    """

    axis: ReplicaAxis
    algorithm: Algorithm | Callable[..., Algorithm] = Algorithm.COMPILER
    packing: GradientPacking = NO_PACKING
    in_bfloat16: bool = False
    combine: Callable[[ReduceOp, list[list[jax.Array]]], Sequence[Any]] | None = None

    @property
    def num_replicas(self) -> int:
        """Size of the replica axis."""
        return self.axis.size

    def all_reduce(self, op: ReduceOp, value: object) -> Any:
        """Combines a local array over the mesh axis; MEAN of integers is a float."""
        if self.combine is not None:
            return self.all_reduce_many(op, [value])[0]
        array = jnp.asarray(value)
        return self._sum(op, array, self.algorithm_of(array.nbytes))

    def all_reduce_many(self, op: ReduceOp, values: Sequence[Any]) -> list[Any]:
        """Combines many arrays, such as gradients, packing several of a dtype into one.

        If one of them is summed in shared memory, all are: sums of two kinds in a step cost more.
        """
        if self.combine is not None:
            gathered = [jax.lax.all_gather(array, self.axis.name) for array in _as_numbers(values)]
            stacks = [[array[replica] for replica in range(self.axis.size)] for array in gathered]
            return [jnp.asarray(result) for result in self.combine(op, stacks)]
        arrays = [jnp.asarray(value) for value in values]
        packs = self.packing.packs(
            [array.nbytes for array in arrays], [array.dtype for array in arrays]
        )
        algorithms = [
            self.algorithm_of(sum(arrays[index].nbytes for index in pack)) for pack in packs
        ]
        if Algorithm.SHARED_MEMORY in algorithms:
            algorithms = [Algorithm.SHARED_MEMORY] * len(packs)
        results = dict[int, jax.Array]()
        for pack, algorithm in zip(packs, algorithms, strict=True):
            if len(pack) == 1:
                results[pack[0]] = self._gradient_sum(op, arrays[pack[0]], algorithm)
                continue
            flat = [arrays[index].ravel() for index in pack]
            joined = self._gradient_sum(op, jnp.concatenate(flat), algorithm)
            parts = jnp.split(joined, np.cumsum([part.size for part in flat])[:-1])
            for index, part in zip(pack, parts, strict=True):
                results[index] = part.reshape(arrays[index].shape)
        return [results[index] for index in range(len(arrays))]

    def parts(self, op: ReduceOp, parts: Sequence[Any], *, are_gradients: bool) -> jax.Array:
        """Combines one array per replica outside a compiled step, added in replica order.

        With `are_gradients`, rounds like `all_reduce_many`.
        """
        arrays = _as_numbers(parts)
        if self.combine is not None:
            return jnp.asarray(self.combine(op, [arrays])[0])
        if are_gradients and self._is_rounded(arrays[0]):
            return mean_of(rounded_sum(arrays), op, len(arrays))
        total = arrays[0]
        for array in arrays[1:]:
            total = total + array
        return mean_of(total, op, len(arrays))

    def algorithm_of(self, size_bytes: int, **facts: bool) -> Algorithm:
        """Returns the algorithm of sums of arrays of a size."""
        rule = self.algorithm
        return rule if isinstance(rule, Algorithm) else rule(size_bytes, **facts)

    def _is_rounded(self, array: jax.Array) -> bool:
        return self.in_bfloat16 and array.dtype == jnp.float32

    def _gradient_sum(self, op: ReduceOp, array: jax.Array, algorithm: Algorithm) -> jax.Array:
        if self._is_rounded(array) and array.size:
            total = sum_over_replicas(array, self.axis, algorithm, in_bfloat16=True)
            return mean_of(total, op, self.axis.size)
        return self._sum(op, array, algorithm)

    def _sum(self, op: ReduceOp, array: jax.Array, algorithm: Algorithm) -> jax.Array:
        is_shared = algorithm is Algorithm.SHARED_MEMORY
        if is_shared:  # what it is where the order of the sums is not known
            algorithm = self.algorithm_of(array.nbytes, shares_memory=False)
        if array.dtype == bool:
            array = array.astype(jnp.int32)
        dtype = array.dtype
        # XLA:CPU crashes where replicas of several devices add bfloat16 (JAX 0.10 to 0.12). NumPy,
        # which adds in shared memory, would round after each replica.
        is_narrow = dtype == jnp.bfloat16 or (is_shared and dtype == jnp.float16)
        if (self.axis.adds_wide or is_shared) and is_narrow:
            array = array.astype(jnp.float32)
        if array.size and is_shared and array.dtype.name in DTYPES:
            array = shared_sum(array, self.axis, algorithm)
        elif array.size:
            array = sum_over_replicas(array, self.axis, algorithm)
        return mean_of(array.astype(dtype), op, self.axis.size)

    def all_gather(self, value: object, axis: int, lengths: tuple[int, ...] | None) -> Any:
        """Concatenates over the mesh axis; `lengths` are the true sizes of padded arrays."""
        value, name, groups = jnp.asarray(value), self.axis.name, self.axis.index_groups
        if lengths is None:
            return jax.lax.all_gather(value, name, axis=axis, tiled=True, axis_index_groups=groups)
        parts = jax.lax.all_gather(value, name, axis=0, tiled=False, axis_index_groups=groups)
        true_parts = [
            jax.lax.slice_in_dim(parts[index], 0, length, axis=axis)
            for index, length in enumerate(lengths)
        ]
        return jnp.concatenate(true_parts, axis=axis)

    def all_to_all(self, value: jax.Array) -> jax.Array:
        """Exchanges rows over the mesh axis."""
        return jax.lax.all_to_all(
            value,
            self.axis.name,
            split_axis=0,
            concat_axis=0,
            axis_index_groups=self.axis.index_groups,
        )

    def among(self, groups: tuple[tuple[int, ...], ...], *, packs: bool = False) -> Communicator:
        """Returns the communicator of this replica's group, whose sums are the compiler's."""
        if len(groups[0]) == 1:
            return SoleCommunicator()
        axis = dataclasses.replace(self.axis, size=len(groups[0]), groups=(), apart=groups)
        return MeshCommunicator(axis, packing=self.packing if packs else NO_PACKING)

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
        return jnp.asarray(leaf.stacked)[jax.lax.axis_index(self.axis.name)]


def _as_numbers(values: Sequence[Any]) -> list[jax.Array]:
    arrays = [jnp.asarray(value) for value in values]
    return [array.astype(jnp.int32) if array.dtype == bool else array for array in arrays]


def _as_local_per_replica(leaf: object) -> Any:
    return PerReplica(local=leaf) if is_array(leaf) else leaf


def _identity(value: object) -> Any:
    return value


def _is_distributed(leaf: object) -> bool:
    return isinstance(leaf, PerReplica | Mirrored)


def _without_mirrored(leaf: object) -> Any:
    return leaf.value if isinstance(leaf, Mirrored) else leaf
