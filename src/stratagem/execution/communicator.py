"""`Communicator`: collectives of one replica, in compiled, eager and single-replica execution.

A compressed gradient travels as shorter numbers or as thin factors; its error is added to the next
one. Between islands each replica sends a part.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from stratagem.devices.all_reduce import (
    NO_PACKING,
    Algorithm,
    GradientPacking,
    ReplicaAxis,
    joined,
    marked_as_sum,
    mean_of,
    rounded_sum,
    shared_sum,
    split_into_shards,
    sum_over_replicas,
)
from stratagem.devices.compression import (
    BFloat16,
    Compression,
    Float8,
    Float16,
    Int8,
    PowerSGD,
    matrix_shape,
)
from stratagem.devices.local_updates import Islands
from stratagem.devices.shared_sums import DTYPES
from stratagem.errors import invalid
from stratagem.options import ReduceOp
from stratagem.variables.distributed import (
    IndexedSlices,
    PerReplica,
    is_array,
    is_distributed,
    without_mirrored,
)

if TYPE_CHECKING:
    from stratagem.contexts import StrategyParts


class Communicator(abc.ABC):
    """Combines arrays over the replicas of a step, as seen from one replica."""

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
        return jax.tree.map(without_mirrored, result, is_leaf=is_distributed)


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
            _as_local_per_replica, (args, kwargs), is_leaf=is_distributed
        )
        result = fn(strategy, *view_args, **view_kwargs)
        return jax.tree.map(self._local_component, result, is_leaf=is_distributed)

    def _local_component(self, leaf: object) -> Any:
        if not isinstance(leaf, PerReplica):
            return without_mirrored(leaf)
        if leaf.objects is not None:
            raise invalid(
                f"The function passed to merge_call returned {leaf}, with Python objects.",
                expected="arrays of one shape and dtype for one compiled program.",
                fix="return arrays, or debug with sg.config.run_eagerly(True).",
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


State = Mapping[str, jax.Array]


def compressed_sums(
    setting: Compression,
    gradients: Sequence[jax.Array],
    states: Sequence[State],
    communicator: Communicator,
    *,
    replica_id: Any,
    step: Any,
) -> tuple[list[jax.Array], list[State]]:
    """Returns the sums of gradients over replicas, and the next state of each.

    Args:
        setting: how the gradients are sent.
        gradients: this replica's, at least one.
        states: of each gradient the arrays that `setting.state_shapes` names, as float32. "error"
            is this replica's own, "factor" is equal on all.
        communicator: of this replica.
        replica_id: of this replica.
        step: number of the step; stochastic rounding follows from it and the replica.

    Returns:
        Sums, in the dtypes of the gradients and bitwise equal on all replicas, and states.
    """
    whole = [gradient.astype(jnp.float32) for gradient in gradients]
    if setting.error_feedback:
        whole = [one + state["error"] for one, state in zip(whole, states, strict=True)]
    factors: Sequence[jax.Array | None] = [None] * len(whole)
    if isinstance(setting, PowerSGD):
        given = [state["factor"] for state in states]
        sums, errors, factors = power_sgd_sums(whole, given, communicator)
    else:
        key = jax.random.fold_in(
            jax.random.fold_in(jax.random.key(0, impl="rbg"), step), replica_id
        )
        sums, errors = sums_of_numbers(setting, whole, communicator, replica_id=replica_id, key=key)
    new_states: list[State] = []
    for error, factor in zip(errors, factors, strict=True):
        state = {"error": error} if setting.error_feedback else {}
        new_states.append(state if factor is None else {**state, "factor": factor})
    return [one.astype(like.dtype) for one, like in zip(sums, gradients, strict=True)], new_states


# Sums of gradients as products of two thin matrices.
#
# Source: Vogels, Karimireddy and Jaggi, PowerSGD, 2019, Algorithms 1 and 2.


def power_sgd_sums(
    gradients: Sequence[jax.Array], factors: Sequence[jax.Array], communicator: Communicator
) -> tuple[list[jax.Array], list[jax.Array], list[jax.Array]]:
    """Returns the sum of each gradient over replicas, this replica's error, and the next factor.

    `factors` are the second factors of the step before, equal on all replicas.
    """
    matrices = [gradient.reshape(matrix_shape(gradient.shape)) for gradient in gradients]
    products = [matrix @ factor for matrix, factor in zip(matrices, factors, strict=True)]
    bases = [
        jnp.linalg.qr(total)[0] for total in communicator.all_reduce_many(ReduceOp.SUM, products)
    ]
    own = [matrix.T @ basis for matrix, basis in zip(matrices, bases, strict=True)]
    summed = communicator.all_reduce_many(ReduceOp.SUM, own)
    sums = [
        (basis @ factor.T).reshape(gradient.shape)
        for basis, factor, gradient in zip(bases, summed, gradients, strict=True)
    ]
    errors = [
        gradient - (basis @ factor.T).reshape(gradient.shape)
        for basis, factor, gradient in zip(bases, own, gradients, strict=True)
    ]
    return sums, errors, summed


# Coding of float32 rows as bytes: shorter floats, and blocks of 8-bit numbers with a scale.

_LARGEST_INT8 = 127.0
_LARGEST_FLOAT8 = 448.0
_LARGEST_FLOAT16 = 65504.0
# Float8 (e4m3): 3 of float32's 23 bits of the fraction, and equal steps below its normal numbers.
_DROPPED_BITS = 20
_SMALLEST_NORMAL, _LEAST_STEP = 2.0**-6, 2.0**-9


def encode(setting: Compression, rows: jax.Array, key: jax.Array) -> jax.Array:
    """Returns float32 rows of shape (n, k) as uint8 of shape (n, bytes).

    Args:
        setting: how.
        rows: rows that are decoded apart from one another.
        key: JAX random key, for stochastic rounding.
    """
    if isinstance(setting, BFloat16):
        return _bytes_of(rows.astype(jnp.bfloat16))
    if isinstance(setting, Float16):
        return _bytes_of(jnp.clip(rows, -_LARGEST_FLOAT16, _LARGEST_FLOAT16).astype(jnp.float16))
    assert isinstance(setting, Int8 | Float8)
    blocks = _in_blocks(rows, setting.block_elements)
    largest = _LARGEST_INT8 if isinstance(setting, Int8) else _LARGEST_FLOAT8
    scales = jnp.max(jnp.abs(blocks), axis=-1, keepdims=True) / largest
    scaled = jnp.where(scales == 0, 0.0, blocks / jnp.where(scales == 0, 1.0, scales))
    noise = jax.random.bits(key, scaled.shape) if setting.stochastic else None
    narrow = _int8(scaled, noise) if isinstance(setting, Int8) else _float8(scaled, noise)
    numbers = _bytes_of(narrow.reshape(rows.shape[0], -1))
    return jnp.concatenate([numbers, _bytes_of(scales.reshape(rows.shape[0], -1))], axis=1)


def decode(setting: Compression, payload: jax.Array, num_elements: int) -> jax.Array:
    """Returns the float32 rows of shape (n, num_elements) that were encoded."""
    if isinstance(setting, BFloat16 | Float16):
        dtype = jnp.bfloat16 if isinstance(setting, BFloat16) else jnp.float16
        return _from_bytes(payload, dtype).astype(jnp.float32)
    assert isinstance(setting, Int8 | Float8)
    width = min(setting.block_elements, num_elements)
    num_blocks = -(-num_elements // width)
    dtype = jnp.int8 if isinstance(setting, Int8) else jnp.float8_e4m3fn
    numbers = _from_bytes(payload[:, : num_blocks * width], dtype).astype(jnp.float32)
    scales = _from_bytes(payload[:, num_blocks * width :], jnp.float32)
    blocks = numbers.reshape(-1, num_blocks, width) * scales[:, :, None]
    return blocks.reshape(payload.shape[0], -1)[:, :num_elements]


def _in_blocks(rows: jax.Array, block_elements: int) -> jax.Array:
    width = min(block_elements, rows.shape[1])
    missing = -rows.shape[1] % width
    padded = jnp.pad(rows, ((0, 0), (0, missing))) if missing else rows
    return padded.reshape(rows.shape[0], -1, width)


def _int8(scaled: jax.Array, noise: jax.Array | None) -> jax.Array:
    rounded = jnp.round(scaled) if noise is None else jnp.floor(scaled + _uniform(noise))
    return jnp.clip(rounded, -_LARGEST_INT8, _LARGEST_INT8).astype(jnp.int8)


def _float8(scaled: jax.Array, noise: jax.Array | None) -> jax.Array:
    if noise is not None:
        scaled = _rounded_by_chance(scaled, noise)
    return jnp.clip(scaled, -_LARGEST_FLOAT8, _LARGEST_FLOAT8).astype(jnp.float8_e4m3fn)


def _rounded_by_chance(scaled: jax.Array, noise: jax.Array) -> jax.Array:
    """Rounds to numbers of float8, up or down by chance."""
    bits = jax.lax.bitcast_convert_type(scaled, jnp.uint32)
    mask = jnp.uint32((1 << _DROPPED_BITS) - 1)
    # A carry into the exponent is the next power of two, as it should be.
    normal = jax.lax.bitcast_convert_type((bits + (noise & mask)) & ~mask, jnp.float32)
    small = jnp.floor(scaled / _LEAST_STEP + _uniform(noise)) * _LEAST_STEP
    return jnp.where(jnp.abs(scaled) < _SMALLEST_NORMAL, small, normal)


def _uniform(noise: jax.Array) -> jax.Array:
    """Numbers of [0, 1) from random bits."""
    return (noise >> 8).astype(jnp.float32) * 2.0**-24


def _bytes_of(rows: jax.Array) -> jax.Array:
    """Returns rows of shape (n, k) as their bytes: XLA:CPU widens narrow floats in messages."""
    as_bytes = jax.lax.bitcast_convert_type(rows, jnp.uint8)
    return as_bytes.reshape(rows.shape[0], -1)


@functools.partial(jax.jit, static_argnums=1, inline=True)
def _from_bytes(payload: jax.Array, dtype: Any) -> jax.Array:
    size = jnp.dtype(dtype).itemsize
    if size == 1:
        return jax.lax.bitcast_convert_type(payload, dtype)
    return jax.lax.bitcast_convert_type(payload.reshape(payload.shape[0], -1, size), dtype)


# Sums of gradients that are sent as shorter numbers.
#
# Each replica adds one part of the sum in float32, so a number is coded twice, before and after the
# sum, whatever the number of replicas. The second error is kept by the replica that added the part.


def sums_of_numbers(
    setting: Compression,
    gradients: Sequence[jax.Array],
    communicator: Communicator,
    *,
    replica_id: Any,
    key: jax.Array,
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Returns the sum of each gradient over replicas, and this replica's error of each.

    All gradients travel together, in two messages.
    """
    count = communicator.num_replicas
    shards = [split_into_shards(gradient, count) for gradient in gradients]
    rows = jnp.concatenate(shards, axis=1)  # a row for each replica
    first_key, second_key = jax.random.split(key)

    sent = encode(setting, rows, first_key)
    errors = rows - decode(setting, sent, rows.shape[1])
    received = decode(setting, communicator.all_to_all(sent), rows.shape[1])
    own_sum = jnp.sum(received, axis=0, keepdims=True)

    sent_sum = encode(setting, own_sum, second_key)
    sums = decode(setting, communicator.all_gather(sent_sum, 0, None), rows.shape[1])
    own_error = own_sum - decode(setting, sent_sum, rows.shape[1])
    is_own = jnp.arange(count)[:, None] == replica_id
    errors = errors + jnp.where(is_own, own_error, 0.0)

    ends = np.cumsum([shard.shape[1] for shard in shards])[:-1]
    return _as_gradients(sums, ends, gradients), _as_gradients(errors, ends, gradients)


def _as_gradients(
    rows: jax.Array, ends: np.ndarray[Any, Any], like: Sequence[jax.Array]
) -> list[jax.Array]:
    return [
        shards.ravel()[: one.size].reshape(one.shape)
        for shards, one in zip(jnp.split(rows, ends, axis=1), like, strict=True)
    ]


# Sums of one array per island, compressed or not: each replica of the island sends a part.


class IslandSums:
    """Sums of one array per island, as seen from one replica of it.

    All replicas of an island have the same array. Each sends a part of it to the replicas of its
    place in the other islands, so that an island sends it once.

    Args:
        islands: the islands.
        communicator: that of all replicas.
        replica_id: ID of this replica among all.
    """

    def __init__(self, islands: Islands, communicator: Communicator, replica_id: Any) -> None:
        self.size = islands.size
        self._inside = communicator.among(islands.members)
        self.between = communicator.among(islands.peers, packs=True)
        self.island_id = replica_id // islands.size
        self._place = replica_id % islands.size

    def by_parts(
        self, add: Callable[[Sequence[Any]], Sequence[Any]], arrays: Sequence[Any]
    ) -> list[Any]:
        """Returns sums between islands, equal on all replicas.

        Args:
            add: returns the sums of arrays over the replicas of `between`.
            arrays: the island's, equal on its replicas.
        """
        if self.size == 1:
            return list(add(arrays))
        sums = add([self.part(array) for array in arrays])
        return [self.equal(total, like) for total, like in zip(sums, arrays, strict=True)]

    def part(self, array: jax.Array) -> jax.Array:
        """Returns this replica's part of an array, flat and padded with zeros."""
        return split_into_shards(array, self.size)[self._place]

    def whole(self, part: jax.Array, like: jax.Array) -> jax.Array:
        """Joins the parts of the replicas of this island."""
        if not like.size:
            return like
        flat = self._gather(part)
        return flat[: like.size].reshape(like.shape)

    def equal(self, part: jax.Array, like: jax.Array) -> jax.Array:
        """Joins the parts of the replicas of this island; parts of a place are equal on all."""
        if not like.size:
            return like
        return joined(self._gather, part)[: like.size].reshape(like.shape)

    def _gather(self, part: jax.Array) -> Any:
        return self._inside.all_gather(part, 0, None)

    def sent_equal(self, array: jax.Array) -> jax.Array:
        """Returns an array that the replicas of a place have in common, equal on all replicas."""
        return array if self.size == 1 else self.equal(self.part(array), jnp.asarray(array))


def compressed_between(
    setting: Compression,
    arrays: Sequence[jax.Array],
    states: Sequence[State],
    sums: IslandSums,
    *,
    step: Any,
) -> tuple[list[jax.Array], list[State]]:
    """Returns the sums of arrays over islands, and the next state of each.

    A state's "error" is a replica's part of the island's: the replicas of an island have equal
    ones, so that the sum over all replicas is what no island has sent yet.

    PowerSGD needs whole matrices: each replica of an island sends the factors, which are small.

    Args:
        setting: how the arrays are sent.
        arrays: the island's, equal on its replicas.
        states: as for `compressed_sums`.
        sums: the islands, as seen from this replica.
        step: number of the step.
    """
    size = sums.size
    errors = [state["error"] * size if "error" in state else None for state in states]
    factors = [state.get("factor") for state in states]
    is_cut = size > 1 and not isinstance(setting, PowerSGD)
    cut = sums.part if is_cut else _as_it_is
    found, news = compressed_sums(
        setting,
        [cut(array) for array in arrays],
        [
            _state(None if error is None else cut(error), factor)
            for error, factor in zip(errors, factors, strict=True)
        ],
        sums.between,
        replica_id=sums.island_id,
        step=step,
    )
    totals, new_states = list[jax.Array](), list[State]()
    for total, new, array in zip(found, news, arrays, strict=True):
        totals.append(sums.equal(total, array) if is_cut else sums.sent_equal(total))
        error, factor = new.get("error"), new.get("factor")
        if error is not None:
            error = (sums.whole(error, array) if is_cut else error) / size
        new_states.append(_state(error, None if factor is None else sums.sent_equal(factor)))
    return totals, new_states


def _as_it_is(array: Any) -> Any:
    return array


def _state(error: Any, factor: Any) -> dict[str, Any]:
    state = {"error": error, "factor": factor}
    return {name: value for name, value in state.items() if value is not None}
