"""Sums of the largest elements of gradients.

Source: Stich, Cordonnier and Jaggi, Sparsified SGD with memory, 2018.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from stratagem.devices.compression import TopK

if TYPE_CHECKING:
    from stratagem.execution.communicator import Communicator


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
