"""Sums of gradients that are sent as shorter numbers.

Each replica adds one part of the sum in float32, so a number is coded twice, before and after the
sum, whatever the number of replicas. The second error is kept by the replica that added the part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from stratagem.devices.collectives.ring import split_into_shards
from stratagem.devices.compression import Compression
from stratagem.execution.compressed.coding import decode, encode

if TYPE_CHECKING:
    from stratagem.execution.communicator import Communicator


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
