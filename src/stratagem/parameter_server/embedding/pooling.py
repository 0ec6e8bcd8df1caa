"""Pooled lookups: weighted sums and means of rows, with padding left out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from stratagem.messages import explain

if TYPE_CHECKING:
    import jax


COMBINERS = ("sum", "mean", "sqrtn")


def pooled(rows: jax.Array, mask: jax.Array | None, weights: Any, combiner: str) -> jax.Array:
    """Returns rows of shape (..., k, dim) combined to (..., dim).

    Args:
        rows: one row for each key.
        mask: False for padding, of shape (..., k); None for no padding.
        weights: of shape (..., k); None for 1.
        combiner: "sum" of weighted rows; "mean" divides it by the sum of weights, and "sqrtn" by
            the root of the sum of their squares. Without any row, the result is zeros.

    Raises:
        ValueError: weights of another shape.

    Source: TF 2.21 embedding_ops.py, embedding_lookup_sparse, safe_embedding_lookup_sparse.
    """
    shape = rows.shape[:-1]
    factors = jnp.ones(shape, rows.dtype) if weights is None else jnp.asarray(weights, rows.dtype)
    if factors.shape != shape:
        raise ValueError(
            explain(
                f"Weights of shape {factors.shape} were given for keys of shape {(*shape, 2)}.",
                expected=f"weights of shape {shape}: one for each key.",
                fix="pad weights like the ids.",
            )
        )
    if mask is not None:
        factors = jnp.where(mask, factors, 0)
    total = jnp.einsum("...k,...kd->...d", factors, rows)
    if combiner == "sum":
        return total
    divisor = factors.sum(-1) if combiner == "mean" else jnp.square(factors).sum(-1)
    is_empty = divisor == 0
    divisor = jnp.where(is_empty, 1, divisor)  # no division by 0 in the gradient either
    if combiner == "sqrtn":
        divisor = jnp.sqrt(divisor)
    return jnp.where(is_empty[..., None], 0, total / divisor[..., None])
