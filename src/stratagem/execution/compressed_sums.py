"""Sums of compressed gradients: the errors of a step are added before, and kept after.

A gradient travels as shorter numbers or as thin factors. Between islands each replica sends a part.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stratagem.devices.collectives.all_reduce import joined, split_into_shards
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
from stratagem.execution.communicator import Communicator
from stratagem.options import ReduceOp

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
