"""`AllReduce`: sums and means over replicas, with a choice of algorithm and packing."""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from stratagem.devices.collectives.axis import ReplicaAxis
from stratagem.devices.collectives.choice import BY_COMPILER, Algorithm, Choice
from stratagem.devices.collectives.packing import NO_PACKING, GradientPacking
from stratagem.devices.collectives.shared_sums import SHARED_SUM, shared_sum
from stratagem.devices.collectives.xla_handler import DTYPES
from stratagem.devices.mesh import REPLICA_AXIS
from stratagem.options import ReduceOp

# All-reduce to one device: gathers all arrays in one place and adds them.
#
# In an SPMD program every replica is that place: all gather and add alike, so nothing is sent back.
# It takes one message per pair of replicas, and n times the memory.


def one_device_sum(
    array: jax.Array,
    axis: ReplicaAxis,
    accumulate: Callable[[Sequence[Any]], Any] | None = None,
) -> jax.Array:
    """Returns the sum of a local array over replicas. Call in a compiled step.

    `accumulate` replaces the sum by a function of the arrays of all replicas, in replica order.

    Source: TF 2.21 cross_device_ops.py, ReductionToOneDevice.
    """
    gathered = jax.lax.all_gather(array, axis.name)
    parts = [gathered[replica] for replica in range(axis.size)]
    if accumulate is not None:
        return jnp.asarray(accumulate(parts))
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


# Ring all-reduce: each replica sends only to its neighbor, and each shard goes around twice.
#
# Every replica sends 2 (n - 1) / n of the array, the least possible, in 2 (n - 1) consecutive
# messages.
#
# Source: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations,
# 2009.


def ring_sum(array: jax.Array, axis: ReplicaAxis) -> jax.Array:
    """Returns the sum of a local array over replicas. Call in a compiled step."""
    count = axis.size
    pieces = split_into_shards(array, count)
    own = jax.lax.axis_index(axis.name)
    onward = [(replica, (replica + 1) % count) for replica in range(count)]

    def piece(number: jax.Array) -> jax.Array:
        return jax.lax.dynamic_index_in_dim(pieces, number % count, keepdims=False)

    # A shard starts at the replica of its number, and accumulates on its way around.
    passing = piece(own)
    for hop in range(1, count):
        passing = jax.lax.ppermute(passing, axis.name, onward) + piece(own - hop)
    # Shard own + 1 is complete here; it goes around once more to reach all replicas.
    whole = jnp.zeros_like(pieces)
    whole = jax.lax.dynamic_update_index_in_dim(whole, passing, (own + 1) % count, 0)
    for hop in range(1, count):
        passing = jax.lax.ppermute(passing, axis.name, onward)
        whole = jax.lax.dynamic_update_index_in_dim(whole, passing, (own + 1 - hop) % count, 0)
    return whole.ravel()[: array.size].reshape(array.shape)


def split_into_shards(array: jax.Array, count: int) -> jax.Array:
    """Splits an array into `count` equal shards, zero-padded: shape (count, elements per shard)."""
    flat = array.ravel()
    missing = -flat.size % count
    return (jnp.pad(flat, (0, missing)) if missing else flat).reshape(count, -1)


# All-reduce of float32 arrays with bfloat16 messages, which are half the size.
#
# Each replica adds one shard of the array in float32, so a value is rounded twice, before and after
# the sum, regardless of the number of replicas. Rounding to the eight significant bits of bfloat16
# changes a number by at most 2**-8 of it, so the error of a sum of values x is at most 2**-8 (sum
# |x|
# + |sum x|), less than one percent of sum |x|.
#
# Source: Rabenseifner, Optimization of collective reduction operations, 2004, for the two stages.


def bfloat16_sum(array: jax.Array, axis: ReplicaAxis) -> jax.Array:
    """Returns the sum of a local float32 array over replicas, bitwise equal on all of them.

    Call in a compiled step.
    """
    return _differentiable_sum(array, axis)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _differentiable_sum(array: jax.Array, axis: ReplicaAxis) -> Any:
    pieces = _pack(split_into_shards(array, axis.size))
    received = jax.lax.all_to_all(pieces, axis.name, split_axis=0, concat_axis=0)
    own = jnp.sum(_unpack(received), axis=0)
    whole = _unpack(jax.lax.all_gather(_pack(own), axis.name))
    return whole.ravel()[: array.size].reshape(array.shape)


def _forward(array: jax.Array, axis: ReplicaAxis) -> tuple[Any, None]:
    return _differentiable_sum(array, axis), None


def _backward(axis: ReplicaAxis, _: None, incoming: jax.Array) -> tuple[jax.Array]:
    return (bfloat16_sum(incoming, axis),)


# A cast to integers has no derivative; the gradient of the sum is the sum of incoming gradients.
_differentiable_sum.defvjp(_forward, _backward)


def rounded_sum(parts: Sequence[jax.Array]) -> jax.Array:
    """Returns the same sum outside a compiled step, from one float32 array per replica."""
    return _unpack(_pack(jnp.sum(_unpack(_pack(jnp.stack(parts))), axis=0)))


# XLA:CPU widens bfloat16 messages to float32, but leaves integers alone.
def _pack(array: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(array.astype(jnp.bfloat16), jnp.uint16)


def _unpack(array: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(array, jnp.bfloat16).astype(jnp.float32)


# Hierarchical all-reduce: within groups, between groups, and within groups again.
#
# Only 1 / (group size) of the array is sent between groups, where links are slow.


def hierarchical_sum(array: jax.Array, axis: ReplicaAxis) -> jax.Array:
    """Returns the sum of a local array over replicas. Call in a compiled step.

    Without groups it is a plain `psum`.

    Source: TF 2.21 cross_device_ops.py, HierarchicalCopyAllReduce.
    """
    if not axis.groups:
        return jax.lax.psum(array, axis.name)

    def between(part: jax.Array, peers: list[list[int]]) -> jax.Array:
        return jax.lax.psum(part, axis.name, axis_index_groups=peers)

    return sum_by_groups(array, axis, between)


def sum_by_groups(
    array: jax.Array,
    axis: ReplicaAxis,
    between: Callable[[jax.Array, list[list[int]]], jax.Array],
) -> jax.Array:
    """Returns the sum of a local array over the replicas of an axis with groups.

    `between` receives a replica's part of its group's sum, and lists of the replicas of each place
    in the groups. It returns the sum over the replicas of a list.
    """
    inside = [list(group) for group in axis.groups]
    peers = [list(one) for one in zip(*axis.groups, strict=True)]
    pieces = split_into_shards(array, len(inside[0]))
    own = jax.lax.psum_scatter(pieces, axis.name, axis_index_groups=inside)
    own = between(own, peers)
    whole = jax.lax.all_gather(own, axis.name, axis_index_groups=inside)
    return jnp.ravel(whole)[: array.size].reshape(array.shape)


# Two-stage all-reduce: each replica adds one shard of the array, and sends the sum to all others.
#
# Every replica sends 2 (n - 1) / n of the array, the least possible, and waits for two messages
# however many replicas there are; a ring waits for 2 (n - 1), one after the other. So it is for
# links
# of a high latency. Groups of nearby replicas add among themselves first, and 1 / (group size) of
# the
# array is sent between them.
#
# Source: Rabenseifner, Optimization of collective reduction operations, 2004, for the two stages.


def two_stage_sum(array: jax.Array, axis: ReplicaAxis) -> jax.Array:
    """Returns the sum of a local array over replicas. Call in a compiled step.

    Shards are added in replica order, so without groups the bits are those of `one_device_sum`.
    """
    if not axis.groups:
        return _exchanged_sum(array, axis.name, axis.size, None)

    def between(part: jax.Array, peers: list[list[int]]) -> jax.Array:
        return _exchanged_sum(part, axis.name, len(peers[0]), peers)

    # JAX cannot batch an exchange in groups. Sums are by element: a batch is one more array.
    @jax.custom_batching.custom_vmap
    def add(whole: jax.Array) -> jax.Array:
        return sum_by_groups(whole, axis, between)

    @add.def_vmap
    def add_batch(_: int, is_batched: list[bool], whole: jax.Array) -> tuple[jax.Array, bool]:
        return add(whole), is_batched[0]

    @jax.custom_vjp
    def differentiable(whole: jax.Array) -> jax.Array:
        return add(whole)

    differentiable.defvjp(lambda whole: (add(whole), None), lambda _, grads: (add(grads),))
    return differentiable(array)


def _exchanged_sum(
    array: jax.Array, name: str | tuple[str, ...], count: int, groups: list[list[int]] | None
) -> jax.Array:
    shards = split_into_shards(array, count)
    received = _exchange(shards, name, groups)
    own = received[0]
    for shard in received[1:]:
        own = own + shard
    # An all-gather would do, but Gloo sends it around a ring. The gradient is the same exchange.
    whole = _exchange(jnp.broadcast_to(own, shards.shape), name, groups)
    return whole.ravel()[: array.size].reshape(array.shape)


def _exchange(
    rows: jax.Array, name: str | tuple[str, ...], groups: list[list[int]] | None
) -> jax.Array:
    return jax.lax.all_to_all(rows, name, split_axis=0, concat_axis=0, axis_index_groups=groups)


# Arrays joined from parts, of which each replica of an island has one.

JOINED = "_stratagem_joined_from_parts"


def joined(gather: Callable[[jax.Array], jax.Array], part: jax.Array) -> jax.Array:
    """Returns what a function gathers from the parts of an island's replicas.

    The parts of one place must be equal on all islands, so that the result is equal on all
    replicas: the replication analysis takes it for a sum over replicas.
    """
    return _stratagem_joined_from_parts(gather, part)


# Recognized by its name in the trace.
@functools.partial(jax.jit, static_argnums=0)
def _stratagem_joined_from_parts(
    gather: Callable[[jax.Array], jax.Array], part: jax.Array
) -> jax.Array:
    return gather(part)


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
