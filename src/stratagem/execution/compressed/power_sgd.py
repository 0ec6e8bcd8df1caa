"""Sums of gradients as products of two thin matrices.

Source: Vogels, Karimireddy and Jaggi, PowerSGD, 2019, Algorithms 1 and 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from stratagem.devices.compression import matrix_shape
from stratagem.options import ReduceOp

if TYPE_CHECKING:
    from stratagem.execution.communicator import Communicator


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
