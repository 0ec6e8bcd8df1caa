"""Sums over replicas in a compiled step: axis, algorithms, the rule that chooses, packs.

A communicator asks the rule for the algorithm of an array, and the packs for the messages of many.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import itertools
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from stratagem.devices.device_assignment import num_slices, slice_of
from stratagem.devices.mesh import REPLICA_AXIS, Topology
from stratagem.options import ReduceOp


@dataclasses.dataclass(frozen=True)
class ReplicaAxis:
    """The mesh axis of the replicas.

    Args:
        name: name of the axis, or names of two.
        size: number of replicas that are combined.
        groups: groups of nearby replicas, all of one size; () if there are none.
        adds_wide: True to add bfloat16 in float32. XLA:CPU normally does so itself, but crashes if
            replicas have several devices (JAX 0.10 to 0.12).
        apart: groups of `size` replicas, each combined on its own; () for all replicas together.
    """

    name: str | tuple[str, ...]
    size: int
    groups: tuple[tuple[int, ...], ...] = ()
    adds_wide: bool = False
    apart: tuple[tuple[int, ...], ...] = ()

    @property
    def index_groups(self) -> list[list[int]] | None:
        """The argument `axis_index_groups` of the functions of `jax.lax`."""
        return [list(group) for group in self.apart] or None

    @staticmethod
    def of(topology: Topology) -> ReplicaAxis:
        """Returns the replica axis of a topology.

        Replicas of one slice form a group; with a single slice, those of one process; with a single
        process, its first and second half, as on a machine with two sockets.
        """
        size = topology.num_replicas
        devices = topology.devices or ()
        in_slices = num_slices(devices) > 1
        members: dict[int, list[int]] = {}
        for replica_id, device in enumerate(devices):
            near = slice_of(device) if in_slices else device.process_index
            members.setdefault(near, []).append(replica_id)
        groups = [tuple(group) for group in members.values()]
        if len(groups) == 1 and size >= 4 and size % 2 == 0:
            groups = [tuple(range(size // 2)), tuple(range(size // 2, size))]
        # JAX has no groups within several axes.
        is_nested = (
            topology.shard_size is None
            and 1 < len(groups) < size
            and len({len(group) for group in groups}) == 1
        )
        adds_wide = topology.groups is not None and topology.platform == "cpu"
        return ReplicaAxis(
            topology.replica_axis, size, tuple(groups) if is_nested else (), adds_wide
        )


class Algorithm(enum.StrEnum):
    """All-reduce algorithm.

    COMPILER: chosen by the compiler: NCCL on GPUs, Gloo between processes on CPU. RING,
    HIERARCHICAL, TWO_STAGE, TO_ONE_DEVICE: written out in the program. TWO_STAGE is for links of a
    high latency.
    SHARED_MEMORY: through memory that the processes of one machine share; not in a loop within a
    step, nor in a function that calls `run`.
    """

    COMPILER = "compiler"
    RING = "ring"
    HIERARCHICAL = "hierarchical"
    TWO_STAGE = "two stages"
    TO_ONE_DEVICE = "to one device"
    SHARED_MEMORY = "shared memory"


def algorithm_for(
    size_bytes: int,
    *,
    platform: str,
    num_replicas: int,
    num_slices: int = 1,
    spans_processes: bool = False,
    shares_memory: bool = False,
) -> Algorithm:
    """Returns the algorithm for the sum of an array; depends on nothing that replicas differ in.

    The figures are milliseconds of a sum, from docs/performance.md and local_updates.md.
    """
    if platform == "tpu" and num_slices > 1:
        # Connections between slices are slower than those inside one. Up to 4 KiB only the number
        # of messages matters, and the compiler merges them into one.
        return Algorithm.COMPILER if size_bytes <= 2**12 else Algorithm.HIERARCHICAL
    if platform != "cpu" or not spans_processes:
        # On accelerators the compiler tunes itself; in one process a rendezvous takes 0.012.
        return Algorithm.COMPILER
    if shares_memory and size_bytes > 2**15:
        # Four processes, by Gloo, gathered, and shared: 64 KiB takes 2.40, 1.28, 0.65, and 16 MiB
        # 32.6, 62, 12.1. A shared sum waits for Python's GIL, which other threads may hold for
        # longer than a smaller sum takes.
        return Algorithm.SHARED_MEMORY
    if num_replicas <= 4 and size_bytes <= 2**18:
        # One gather instead of Gloo's messages around a ring, twice. By Gloo and gathered, two
        # processes: 4 KiB takes 0.27, 0.14, and 256 KiB 0.52, 0.44. Four: 2.32, 1.07, and 2.46,
        # 1.99, but 1 MiB 3.66, 5.75. More were not measured, and need as many times the memory.
        return Algorithm.TO_ONE_DEVICE
    # Gloo. A ring is slower: 5.65 for 3.66 (1 MiB, four processes), 190 for 120 (13 MB between two
    # hosts, 1 Gbit/s). Only over a latency of 50 ms it is not, 270 for 480: a choice of the user's.
    return Algorithm.COMPILER


# Packing of gradients into fewer, larger messages.


@dataclasses.dataclass(frozen=True)
class SizedPacks:
    """Packs arrays up to a size.

    Args:
        max_array_bytes: larger arrays are sent alone, since copying them costs more than a message.
        pack_bytes: maximum size of a pack.
        max_num_arrays: more arrays of one kind are all sent alone. XLA:CPU compiles a kernel for
            each place in a pack.
    """

    max_array_bytes: int
    pack_bytes: int
    max_num_arrays: int = sys.maxsize

    def packs(self, sizes_bytes: Sequence[int], kinds: Sequence[Hashable]) -> list[list[int]]:
        """Returns the indices of the arrays in each message."""
        alone: list[list[int]] = []
        packs: list[list[int]] = []
        open_packs: dict[Hashable, tuple[list[int], int]] = {}
        is_small = [size <= self.max_array_bytes for size in sizes_bytes]
        counts = collections.Counter(itertools.compress(kinds, is_small))
        for index, (size, kind) in enumerate(zip(sizes_bytes, kinds, strict=True)):
            if not is_small[index] or counts[kind] > self.max_num_arrays:
                alone.append([index])
                continue
            pack, filled = open_packs.get(kind, ([], 0))
            if not pack or filled + size > self.pack_bytes:
                pack, filled = [], 0
                packs.append(pack)
            pack.append(index)
            open_packs[kind] = pack, filled + size
        return alone + packs


@dataclasses.dataclass(frozen=True)
class NumberedPacks:
    """Packs arrays, in order, into a number of packs of similar size.

    Args:
        num_packs: maximum number of packs of each kind of arrays, at least 1.
    """

    num_packs: int

    def packs(self, sizes_bytes: Sequence[int], kinds: Sequence[Hashable]) -> list[list[int]]:
        """Returns the indices of the arrays in each message."""
        packs: dict[tuple[Hashable, int], list[int]] = {}
        for kind in dict.fromkeys(kinds):
            indices = [index for index, other in enumerate(kinds) if other == kind]
            ends = list(itertools.accumulate(sizes_bytes[index] for index in indices))
            for index, end in zip(indices, ends, strict=True):
                middle = end - sizes_bytes[index] / 2
                # The middle of an empty last array is at the very end.
                number = min(int(middle * self.num_packs / max(ends[-1], 1)), self.num_packs - 1)
                packs.setdefault((kind, number), []).append(index)
        return list(packs.values())


GradientPacking = SizedPacks | NumberedPacks
NO_PACKING = SizedPacks(max_array_bytes=-1, pack_bytes=0)
# Measured on two CPU devices of one process: copying larger arrays costs more than their messages.
# The 73 small gradients of BERT in a pack: 250 more kernels, 1.5 times the time of compilation.
WITHIN_PROCESS = SizedPacks(max_array_bytes=2**16, pack_bytes=2**62, max_num_arrays=16)
# Two processes, MLP of 235,000 parameters: 181 steps/s unpacked, 213 with packs of 256 KiB, 93 with
# 1 MiB and 62 with 4 MiB, because XLA:CPU copies large gradients slowly.
_BYTES_BETWEEN_PROCESSES = 2**18


def packing_for(platform: str, *, spans_processes: bool, bytes_per_pack: int) -> GradientPacking:
    """Returns the packing of gradients for a platform.

    None on accelerators, where the compiler combines messages.

    Args:
        platform: of the devices.
        spans_processes: whether messages leave the process.
        bytes_per_pack: between processes; 0 for 256 KiB.
    """
    if platform != "cpu":
        return NO_PACKING
    if not spans_processes:
        return WITHIN_PROCESS
    size = bytes_per_pack or _BYTES_BETWEEN_PROCESSES
    return SizedPacks(max_array_bytes=size, pack_bytes=size)


# All-reduce to one device: gathers all arrays in one place and adds them.
#
# In an SPMD program every replica is that place: all gather and add alike, so nothing is sent back.
# It takes one message per pair of replicas, and n times the memory.


def one_device_sum(array: jax.Array, axis: ReplicaAxis) -> jax.Array:
    """Returns the sum of a local array over replicas. Call in a compiled step.

    Source: TF 2.21 cross_device_ops.py, ReductionToOneDevice.
    """
    gathered = jax.lax.all_gather(array, axis.name)
    total, *others = [gathered[replica] for replica in range(axis.size)]
    for part in others:
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
# changes a number by at most 2**-8 of it, so the error of a sum of values x is at most
# 2**-8 (sum |x| + |sum x|), less than one percent of sum |x|.
#
# Source: Rabenseifner, Optimization of collective reduction operations, 2004, for the two stages.


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def bfloat16_sum(array: jax.Array, axis: ReplicaAxis) -> Any:
    """Returns the sum of a local float32 array over replicas, bitwise equal on all of them.

    Call in a compiled step.
    """
    pieces = _pack(split_into_shards(array, axis.size))
    received = jax.lax.all_to_all(pieces, axis.name, split_axis=0, concat_axis=0)
    own = jnp.sum(_unpack(received), axis=0)
    whole = _unpack(jax.lax.all_gather(_pack(own), axis.name))
    return whole.ravel()[: array.size].reshape(array.shape)


def _forward(array: jax.Array, axis: ReplicaAxis) -> tuple[Any, None]:
    return bfloat16_sum(array, axis), None


def _backward(axis: ReplicaAxis, _: None, incoming: jax.Array) -> tuple[jax.Array]:
    return (bfloat16_sum(incoming, axis),)


# A cast to integers has no derivative; the gradient of the sum is the sum of incoming gradients.
bfloat16_sum.defvjp(_forward, _backward)


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
# links of a high latency. Groups of nearby replicas add among themselves first, and
# 1 / (group size) of the array is sent between them.
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


_Sum = Callable[[jax.Array, ReplicaAxis], jax.Array]


def _compiler_sum(array: jax.Array, axis: ReplicaAxis) -> jax.Array:
    return jax.lax.psum(array, axis.name, axis_index_groups=axis.index_groups)


_SUMS: Mapping[Algorithm, _Sum] = {
    Algorithm.COMPILER: _compiler_sum,
    Algorithm.RING: ring_sum,
    Algorithm.HIERARCHICAL: hierarchical_sum,
    Algorithm.TWO_STAGE: two_stage_sum,
    Algorithm.TO_ONE_DEVICE: one_device_sum,
    Algorithm.SHARED_MEMORY: _compiler_sum,  # where the order of the sums is not known
}


def sum_over_replicas(
    array: jax.Array, axis: ReplicaAxis, algorithm: Algorithm, *, in_bfloat16: bool = False
) -> jax.Array:
    """Returns the sum of a local array by an algorithm, or by `bfloat16_sum`."""
    add = bfloat16_sum if in_bfloat16 else _SUMS[algorithm]
    if add is _compiler_sum:
        return _compiler_sum(array, axis)
    return _stratagem_sum_over_replicas(add, array, axis)


def shared_sum(array: jax.Array, axis: ReplicaAxis, elsewhere: Algorithm) -> jax.Array:
    """Returns the sum of a local array, in shared memory where the order of the sums is known.

    `shared_sums.in_order` puts that in the place of the other algorithm.
    """
    return _stratagem_shared_sum_over_replicas(_SUMS[elsewhere], array, axis)


def marked_as_sum(value: object) -> jax.Array:
    """Returns a value marked in the trace as the sum over the only replica."""
    return _stratagem_sum_over_replicas(_sole_sum, jnp.asarray(value), _SOLE)


_SOLE = ReplicaAxis(REPLICA_AXIS, 1)


def _sole_sum(array: jax.Array, axis: ReplicaAxis) -> jax.Array:
    return jax.lax.optimization_barrier(array)  # JAX removes a function that does nothing


# The replication analysis cannot prove that a sum made of messages between neighbors is equal on
# all replicas. It recognizes these functions, and their gradients, by name in the trace.

SHARED_SUM = "_stratagem_shared_sum_over_replicas"


@functools.partial(jax.jit, static_argnums=(0, 2))
def _stratagem_sum_over_replicas(add: _Sum, array: jax.Array, axis: ReplicaAxis) -> jax.Array:
    return add(array, axis)


@functools.partial(jax.jit, static_argnums=(0, 2))
def _stratagem_shared_sum_over_replicas(
    add: _Sum, array: jax.Array, axis: ReplicaAxis
) -> jax.Array:
    return add(array, axis)


def is_sum_over_replicas(eqn: JaxprEqn) -> bool:
    """Returns True if a jaxpr equation is one of the sums in this module, or its gradient."""
    return eqn.params.get("name") in ("_stratagem_sum_over_replicas", SHARED_SUM, JOINED)


def mean_of(total: jax.Array, op: ReduceOp, count: int) -> jax.Array:
    """Returns the sum itself, or divided by `count` for MEAN."""
    return total if op is ReduceOp.SUM else jnp.true_divide(total, count)
