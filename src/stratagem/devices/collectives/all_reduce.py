"""`AllReduce`: sums and means over replicas, with a choice of algorithm and packing."""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from stratagem.devices.collectives.axis import ReplicaAxis
from stratagem.devices.collectives.bfloat16 import bfloat16_sum, rounded_sum
from stratagem.devices.collectives.choice import BY_COMPILER, Algorithm, Choice
from stratagem.devices.collectives.hierarchical import hierarchical_sum
from stratagem.devices.collectives.joined import JOINED
from stratagem.devices.collectives.one_device import one_device_sum
from stratagem.devices.collectives.packing import NO_PACKING, GradientPacking
from stratagem.devices.collectives.ring import ring_sum
from stratagem.devices.collectives.shared_sums import SHARED_SUM, shared_sum
from stratagem.devices.collectives.two_stage import two_stage_sum
from stratagem.devices.collectives.xla_handler import DTYPES
from stratagem.devices.mesh import REPLICA_AXIS
from stratagem.options import ReduceOp


class AllReduce(abc.ABC):
    """Combines arrays over replicas, in a compiled step or from one array per replica.

    In a step it runs inside `jax.shard_map` with `check_vma=False`, where the transpose of a sum
    over replicas is again a sum over replicas: the gradient that `tf.distribute` defines.

    Example:
        >>> strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> all_reduce = strategy.cross_device_ops.all_reduce(strategy.topology)
        >>> isinstance(all_reduce, sg.collectives.AllReduce), all_reduce.axis.size
        (True, 2)
        >>> float(all_reduce.parts(sg.ReduceOp.MEAN, [1.0, 3.0], are_gradients=False))
        2.0

    Source: JAX, jax.lax.psum; TF 2.21 cross_device_ops.py, CrossDeviceOps.
    """

    axis: ReplicaAxis

    @abc.abstractmethod
    def one(self, op: ReduceOp, value: object) -> jax.Array:
        """Combines a local array over replicas, with the result on each of them.

        SUM keeps the dtype; MEAN of integers is a float.

        Source: JAX, jax.lax.psum; TF 2.21 distribute_lib.py, ReplicaContext.all_reduce.
        """

    @abc.abstractmethod
    def many(self, op: ReduceOp, values: Sequence[Any]) -> list[jax.Array]:
        """Combines many arrays, such as gradients; equals `one` up to the rounding requested."""

    @abc.abstractmethod
    def parts(self, op: ReduceOp, parts: Sequence[Any], *, are_gradients: bool) -> jax.Array:
        """Combines one array per replica, outside a compiled step.

        With `are_gradients`, rounds like `many`.
        """


_Sum = Callable[[jax.Array, ReplicaAxis], jax.Array]


def _compiler_sum(array: jax.Array, axis: ReplicaAxis) -> jax.Array:
    return jax.lax.psum(array, axis.name, axis_index_groups=axis.index_groups)


_SUMS: Mapping[Algorithm, _Sum] = {
    Algorithm.COMPILER: _compiler_sum,
    Algorithm.RING: ring_sum,
    Algorithm.HIERARCHICAL: hierarchical_sum,
    Algorithm.TWO_STAGE: two_stage_sum,
    Algorithm.TO_ONE_DEVICE: one_device_sum,
}


# The replication analysis cannot prove that a sum made of messages between neighbors is equal on
# all replicas. It recognizes this function, and its gradient, by name in the trace.
@functools.partial(jax.jit, static_argnums=(0, 2))
def _stratagem_sum_over_replicas(add: _Sum, array: jax.Array, axis: ReplicaAxis) -> jax.Array:
    return add(array, axis)


def marked_as_sum(value: object) -> jax.Array:
    """Returns a value marked in the trace as the sum over the only replica."""
    return _stratagem_sum_over_replicas(_sole_sum, jnp.asarray(value), _SOLE)


_SOLE = ReplicaAxis(REPLICA_AXIS, 1)


def _sole_sum(array: jax.Array, axis: ReplicaAxis) -> jax.Array:
    return jax.lax.optimization_barrier(array)  # JAX removes a function that does nothing


def is_sum_over_replicas(eqn: JaxprEqn) -> bool:
    """Returns True if a jaxpr equation is one of the sums in this module, or its gradient.

    Example:
        >>> axis = sg.collectives.ReplicaAxis("replica", 2)
        >>> rule = sg.collectives.Choice(sg.collectives.Algorithm.RING)
        >>> ring = sg.collectives.ChosenAllReduce(axis, rule)
        >>> def step(x):
        ...     return ring.one(sg.ReduceOp.SUM, x * 2)
        >>> traced = jax.make_jaxpr(step, axis_env=[("replica", 2)])(np.ones(4))
        >>> [sg.collectives.is_sum_over_replicas(eqn) for eqn in traced.eqns]
        [False, True]

    Source: specific to Stratagem.
    """
    return eqn.params.get("name") in ("_stratagem_sum_over_replicas", SHARED_SUM, JOINED)


@dataclasses.dataclass(frozen=True)
class ChosenAllReduce(AllReduce):
    """Combines arrays by an algorithm chosen by their size.

    With `in_bfloat16`, float32 gradients are sent as bfloat16.

    Example:
        >>> axis = sg.collectives.ReplicaAxis("replica", 2)
        >>> rule = sg.collectives.Choice(sg.collectives.Algorithm.RING)
        >>> ring = sg.collectives.ChosenAllReduce(axis, rule)
        >>> step = jax.vmap(lambda x: ring.one(sg.ReduceOp.SUM, x), axis_name="replica")
        >>> step(np.float32([1, 3])).tolist()  # both replicas have the sum
        [4.0, 4.0]

    Source: specific to Stratagem.
    """

    axis: ReplicaAxis
    choice: Choice = BY_COMPILER
    packing: GradientPacking = NO_PACKING
    in_bfloat16: bool = False

    def one(self, op: ReduceOp, value: object) -> jax.Array:
        """Combines one array."""
        array = jnp.asarray(value)
        return self._combine_by(self.choice.algorithm(array.nbytes), op, array)

    def many(self, op: ReduceOp, values: Sequence[Any]) -> list[jax.Array]:
        """Combines many arrays, packing several of a dtype into one.

        If one of them is summed in shared memory, all are: sums of two kinds in a step cost more.
        """
        arrays = [jnp.asarray(value) for value in values]
        packs = self.packing.packs(
            [array.nbytes for array in arrays], [array.dtype for array in arrays]
        )
        algorithms = [
            self.choice.algorithm(sum(arrays[index].nbytes for index in pack)) for pack in packs
        ]
        if Algorithm.SHARED_MEMORY in algorithms:
            algorithms = [Algorithm.SHARED_MEMORY] * len(packs)
        results = dict[int, jax.Array]()
        for pack, algorithm in zip(packs, algorithms, strict=True):
            if len(pack) == 1:
                results[pack[0]] = self._send(algorithm, op, arrays[pack[0]])
                continue
            flat = [arrays[index].ravel() for index in pack]
            joined = self._send(algorithm, op, jnp.concatenate(flat))
            parts = jnp.split(joined, np.cumsum([part.size for part in flat])[:-1])
            for index, part in zip(pack, parts, strict=True):
                results[index] = part.reshape(arrays[index].shape)
        return [results[index] for index in range(len(arrays))]

    def parts(self, op: ReduceOp, parts: Sequence[Any], *, are_gradients: bool) -> jax.Array:
        """Adds the parts in replica order."""
        arrays = _as_arrays(parts)
        if are_gradients and self._is_rounded(arrays[0]):
            return mean_of(rounded_sum(arrays), op, len(arrays))
        total = arrays[0]
        for array in arrays[1:]:
            total = total + array
        return mean_of(total, op, len(arrays))

    def _send(self, algorithm: Algorithm, op: ReduceOp, array: jax.Array) -> jax.Array:
        if self._is_rounded(array):
            return self._combine(op, array, bfloat16_sum)
        return self._combine_by(algorithm, op, array)

    def _combine_by(self, algorithm: Algorithm, op: ReduceOp, array: jax.Array) -> jax.Array:
        if algorithm is not Algorithm.SHARED_MEMORY:
            return self._combine(op, array, _SUMS[algorithm])
        elsewhere = _SUMS[(self.choice.elsewhere or BY_COMPILER).algorithm(array.nbytes)]
        return self._combine(op, array, elsewhere, is_shared=True)

    def _is_rounded(self, array: jax.Array) -> bool:
        return self.in_bfloat16 and array.dtype == jnp.float32

    def _combine(
        self, op: ReduceOp, array: jax.Array, add: _Sum, *, is_shared: bool = False
    ) -> jax.Array:
        if array.dtype == bool:
            array = array.astype(jnp.int32)
        dtype = array.dtype
        is_narrow = dtype == jnp.bfloat16 or (is_shared and dtype == jnp.float16)
        if (self.axis.adds_wide or is_shared) and is_narrow:
            array = array.astype(jnp.float32)
        if array.size and is_shared and array.dtype.name in DTYPES:
            array = shared_sum(array, self.axis, add)
        elif array.size and add is _compiler_sum:
            array = add(array, self.axis)
        elif array.size:
            array = _stratagem_sum_over_replicas(add, array, self.axis)
        return mean_of(array.astype(dtype), op, self.axis.size)


@dataclasses.dataclass(frozen=True)
class GatheredAllReduce(AllReduce):
    """Combines arrays with a function that receives the arrays of all replicas.

    `combine` receives the op and, for each value, a list of the arrays of all replicas. It returns
    one result per value.

    Example:
        >>> def largest(op, stacks):
        ...     return [jax.numpy.stack(parts).max(axis=0) for parts in stacks]
        >>> axis = sg.collectives.ReplicaAxis("replica", 2)
        >>> all_reduce = sg.collectives.GatheredAllReduce(axis, largest)
        >>> float(all_reduce.parts(sg.ReduceOp.SUM, [1.0, 3.0], are_gradients=False))
        3.0

    Source: specific to Stratagem.
    """

    axis: ReplicaAxis
    combine: Callable[[ReduceOp, list[list[jax.Array]]], Sequence[Any]]

    def one(self, op: ReduceOp, value: object) -> jax.Array:
        """Combines one array."""
        return self.many(op, [value])[0]

    def many(self, op: ReduceOp, values: Sequence[Any]) -> list[jax.Array]:
        """Combines many arrays in one call of the function."""
        gathered = [jax.lax.all_gather(array, self.axis.name) for array in _as_arrays(values)]
        stacks = [[array[replica] for replica in range(self.axis.size)] for array in gathered]
        return [jnp.asarray(result) for result in self.combine(op, stacks)]

    def parts(self, op: ReduceOp, parts: Sequence[Any], *, are_gradients: bool) -> jax.Array:
        """Combines the parts."""
        return jnp.asarray(self.combine(op, [_as_arrays(parts)])[0])


def mean_of(total: jax.Array, op: ReduceOp, count: int) -> jax.Array:
    """Returns the sum itself, or divided by `count` for MEAN.

    Example:
        >>> total = jax.numpy.asarray(6.0)
        >>> float(sg.collectives.mean_of(total, sg.ReduceOp.SUM, 3))
        6.0
        >>> float(sg.collectives.mean_of(total, sg.ReduceOp.MEAN, 3))
        2.0

    Source: specific to Stratagem.
    """
    return total if op is ReduceOp.SUM else jnp.true_divide(total, count)


def _as_arrays(values: Sequence[Any]) -> list[jax.Array]:
    arrays = [jnp.asarray(value) for value in values]
    return [array.astype(jnp.int32) if array.dtype == bool else array for array in arrays]
