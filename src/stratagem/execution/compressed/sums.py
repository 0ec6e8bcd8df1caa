"""The compressed sum of gradients: errors added before, and kept after."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from stratagem.devices.collectives.all_reduce import split_into_shards
from stratagem.devices.compression import (
    BFloat16,
    Compression,
    Float8,
    Float16,
    Int8,
    PowerSGD,
    TopK,
    matrix_shape,
)
from stratagem.options import ReduceOp

if TYPE_CHECKING:
    from stratagem.execution.communicator import Communicator

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


# Sums of the largest elements of gradients.
#
# Source: Stich, Cordonnier and Jaggi, Sparsified SGD with memory, 2018.


def top_k_sums(
    setting: TopK, gradients: Sequence[jax.Array], communicator: Communicator
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Returns the sum of each gradient's sent elements, and this replica's elements not sent.

    All gradients travel in one message.
    """
    counts = [setting.count(gradient.shape) for gradient in gradients]
    places = [
        jax.lax.top_k(jnp.abs(gradient.ravel()), count)[1]
        for gradient, count in zip(gradients, counts, strict=True)
    ]
    values = [gradient.ravel()[place] for gradient, place in zip(gradients, places, strict=True)]
    as_integers = jax.lax.bitcast_convert_type(jnp.concatenate(values), jnp.int32)
    message = jnp.stack([as_integers, jnp.concatenate(places)])
    gathered = communicator.all_gather(message[None], 0, None)
    ends = np.cumsum(counts)
    sums: list[jax.Array] = []
    for gradient, count, end in zip(gradients, counts, ends, strict=True):
        total = jnp.zeros(gradient.size, gradient.dtype)
        # One replica after the other: places of a replica differ, so that the order is the same
        # on all of them.
        for replica in range(communicator.num_replicas):
            part = gathered[replica, :, end - count : end]
            value = jax.lax.bitcast_convert_type(part[0], jnp.float32)
            total = total.at[part[1]].add(value, unique_indices=True)
        sums.append(total.reshape(gradient.shape))
    errors = [
        gradient.ravel().at[place].set(0.0, unique_indices=True).reshape(gradient.shape)
        for gradient, place in zip(gradients, places, strict=True)
    ]
    return sums, errors


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
    joined = jnp.concatenate(shards, axis=1)  # a row for each replica
    first_key, second_key = jax.random.split(key)

    sent = encode(setting, joined, first_key)
    errors = joined - decode(setting, sent, joined.shape[1])
    received = decode(setting, communicator.all_to_all(sent), joined.shape[1])
    own_sum = jnp.sum(received, axis=0, keepdims=True)

    sent_sum = encode(setting, own_sum, second_key)
    sums = decode(setting, communicator.all_gather(sent_sum, 0, None), joined.shape[1])
    own_error = own_sum - decode(setting, sent_sum, joined.shape[1])
    is_own = jnp.arange(count)[:, None] == replica_id
    errors = errors + jnp.where(is_own, own_error, 0.0)

    ends = np.cumsum([shard.shape[1] for shard in shards])[:-1]
    return _as_gradients(sums, ends, gradients), _as_gradients(errors, ends, gradients)


def _as_gradients(
    joined: jax.Array, ends: np.ndarray[Any, Any], like: Sequence[jax.Array]
) -> list[jax.Array]:
    return [
        shards.ravel()[: one.size].reshape(one.shape)
        for shards, one in zip(jnp.split(joined, ends, axis=1), like, strict=True)
    ]


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
    elif isinstance(setting, TopK):
        sums, errors = top_k_sums(setting, whole, communicator)
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
