"""How values of replicas are combined in a step: by which algorithm, in which messages."""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stratagem.collectives.axis import ReplicaAxis
from stratagem.collectives.bfloat16 import bfloat16_sum, rounded_sum
from stratagem.collectives.choice import BY_COMPILER, Algorithm, Choice
from stratagem.collectives.hierarchical import hierarchical_sum
from stratagem.collectives.one_device import one_device_sum
from stratagem.collectives.packing import NO_PACKING, Packing
from stratagem.collectives.ring import ring_sum
from stratagem.options import ReduceOp
from stratagem.topology.mesh import REPLICA_AXIS

__all__ = [
    "AllReduce",
    "ChosenAllReduce",
    "GatheredAllReduce",
    "is_sum_over_replicas",
    "mean_of",
    "noted_as_sum",
]


class AllReduce(abc.ABC):
    """Combines arrays over replicas: inside a compiled step, or one array a replica at hand.

    Inside a step it runs in `jax.shard_map` with `check_vma=False`, where the transpose of a sum
    over replicas is again a sum over replicas: the gradient that `tf.distribute` defines.

    Args:
        axis: the replicas.
    """

    axis: ReplicaAxis

    @abc.abstractmethod
    def one(self, op: ReduceOp, value: Any) -> jax.Array:
        """Combines a value over replicas, on each of them.

        Args:
            op: SUM or MEAN.
            value: local array, of one shape on all replicas.

        Returns:
            Array of the same shape; the dtype is kept by SUM, and MEAN of integers is a float.

        Source: JAX, jax.lax.psum; TF 2.21 distribute_lib.py, ReplicaContext.all_reduce.
        """

    @abc.abstractmethod
    def many(self, op: ReduceOp, values: Sequence[Any]) -> list[jax.Array]:
        """Combines many values over replicas, as gradients are.

        Args:
            op: SUM or MEAN.
            values: local arrays, each of one shape on all replicas.

        Returns:
            What `one` returns for each, within the rounding that was asked for.
        """

    @abc.abstractmethod
    def parts(self, op: ReduceOp, parts: Sequence[Any], *, are_gradients: bool) -> jax.Array:
        """Combines one value a replica, outside a compiled step.

        Args:
            op: SUM or MEAN.
            parts: arrays of one shape and dtype, in replica order.
            are_gradients: whether `many` would combine them.

        Returns:
            What each replica would get.
        """


_Sum = Callable[[jax.Array, ReplicaAxis], jax.Array]


def _compiler_sum(array: jax.Array, axis: ReplicaAxis) -> jax.Array:
    return jax.lax.psum(array, axis.name)


_SUMS: Mapping[Algorithm, _Sum] = {
    Algorithm.COMPILER: _compiler_sum,
    Algorithm.RING: ring_sum,
    Algorithm.HIERARCHICAL: hierarchical_sum,
    Algorithm.TO_ONE_DEVICE: one_device_sum,
}


# Made of messages between neighbours, such a sum does not look as if it were the same on every
# replica. As a function of its own in the trace it is known by its name, its gradient too.
@functools.partial(jax.jit, static_argnums=(0, 2))
def _stratagem_sum_over_replicas(add: _Sum, array: jax.Array, axis: ReplicaAxis) -> jax.Array:
    return add(array, axis)


def noted_as_sum(value: Any) -> jax.Array:
    """Returns a value, which the trace tells to be the sum over the only replica.

    Args:
        value: array.
    """
    return _stratagem_sum_over_replicas(_sole_sum, jnp.asarray(value), _SOLE)


_SOLE = ReplicaAxis(REPLICA_AXIS, 1)


def _sole_sum(array: jax.Array, axis: ReplicaAxis) -> jax.Array:
    return jax.lax.optimization_barrier(array)  # JAX leaves out a function that does nothing


def is_sum_over_replicas(eqn: Any) -> bool:
    """Tells whether an operation of a trace is one of the sums here, or its gradient.

    Args:
        eqn: the operation, a `jax.extend.core.JaxprEqn`.

    Returns:
        True for the sums that are written out in the program, by whichever algorithm.
    """
    return eqn.params.get("name") == "_stratagem_sum_over_replicas"


@dataclasses.dataclass(frozen=True)
class ChosenAllReduce(AllReduce):
    """Combines arrays by an algorithm that their size chooses.

    Args:
        axis: the replicas.
        choice: of the algorithm.
        packing: which of many arrays travel as one.
        in_bfloat16: whether gradients of float32 travel in bfloat16.
    """

    axis: ReplicaAxis
    choice: Choice = BY_COMPILER
    packing: Packing = NO_PACKING
    in_bfloat16: bool = False

    def one(self, op: ReduceOp, value: Any) -> jax.Array:
        """Combines a value."""
        array = jnp.asarray(value)
        return self._combine(op, array, _SUMS[self.choice.algorithm(array.nbytes)])

    def many(self, op: ReduceOp, values: Sequence[Any]) -> list[jax.Array]:
        """Combines many values, several of a dtype as one array."""
        arrays = [jnp.asarray(value) for value in values]
        packs = self.packing.packs(
            [array.nbytes for array in arrays], [array.dtype for array in arrays]
        )
        results = dict[int, jax.Array]()
        for pack in packs:
            if len(pack) == 1:
                results[pack[0]] = self._message(op, arrays[pack[0]])
                continue
            flat = [arrays[index].ravel() for index in pack]
            joined = self._message(op, jnp.concatenate(flat))
            parts = jnp.split(joined, np.cumsum([part.size for part in flat])[:-1])
            for index, part in zip(pack, parts, strict=True):
                results[index] = part.reshape(arrays[index].shape)
        return [results[index] for index in range(len(arrays))]

    def parts(self, op: ReduceOp, parts: Sequence[Any], *, are_gradients: bool) -> jax.Array:
        """Adds the parts in replica order."""
        arrays = _arrays(parts)
        if are_gradients and self._is_rounded(arrays[0]):
            return mean_of(rounded_sum(arrays), op, len(arrays))
        total = arrays[0]
        for array in arrays[1:]:
            total = total + array
        return mean_of(total, op, len(arrays))

    def _message(self, op: ReduceOp, array: jax.Array) -> jax.Array:
        if self._is_rounded(array):
            return self._combine(op, array, bfloat16_sum)
        return self.one(op, array)

    def _is_rounded(self, array: jax.Array) -> bool:
        return self.in_bfloat16 and array.dtype == jnp.float32

    def _combine(self, op: ReduceOp, array: jax.Array, add: _Sum) -> jax.Array:
        if array.dtype == bool:
            array = array.astype(jnp.int32)
        dtype = array.dtype
        if self.axis.adds_wide and dtype == jnp.bfloat16:
            array = array.astype(jnp.float32)
        if array.size and add is _compiler_sum:
            array = add(array, self.axis)
        elif array.size:
            array = _stratagem_sum_over_replicas(add, array, self.axis)
        return mean_of(array.astype(dtype), op, self.axis.size)


@dataclasses.dataclass(frozen=True)
class GatheredAllReduce(AllReduce):
    """Combines arrays by a function that sees those of all replicas.

    Args:
        axis: the replicas.
        combine: given the op and a list with the arrays of all replicas for each value, returns a
            result for each value.
    """

    axis: ReplicaAxis
    combine: Callable[[ReduceOp, list[list[jax.Array]]], Sequence[Any]]

    def one(self, op: ReduceOp, value: Any) -> jax.Array:
        """Combines a value."""
        return self.many(op, [value])[0]

    def many(self, op: ReduceOp, values: Sequence[Any]) -> list[jax.Array]:
        """Combines many values in one call of the function."""
        gathered = [jax.lax.all_gather(array, self.axis.name) for array in _arrays(values)]
        stacks = [[array[replica] for replica in range(self.axis.size)] for array in gathered]
        return [jnp.asarray(result) for result in self.combine(op, stacks)]

    def parts(self, op: ReduceOp, parts: Sequence[Any], *, are_gradients: bool) -> jax.Array:
        """Combines the parts."""
        return jnp.asarray(self.combine(op, [_arrays(parts)])[0])


def mean_of(total: jax.Array, op: ReduceOp, count: int) -> jax.Array:
    """Returns what an op makes of a sum.

    Args:
        total: the sum.
        op: SUM or MEAN.
        count: of what was added.
    """
    return total if op is ReduceOp.SUM else jnp.true_divide(total, count)


def _arrays(values: Sequence[Any]) -> list[jax.Array]:
    arrays = [jnp.asarray(value) for value in values]
    return [array.astype(jnp.int32) if array.dtype == bool else array for array in arrays]
