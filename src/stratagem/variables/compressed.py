"""Choice of the variables whose gradients are sent compressed."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from stratagem.compression import Compression
from stratagem.variables.store import store_of

__all__ = ["is_compressed"]


def is_compressed(variable: Any, compression: Compression | None) -> bool:
    """Returns True if gradients of a variable are sent compressed: the only place that decides.

    Args:
        variable: a trained variable.
        compression: of the strategy; None compresses nothing.
    """
    if compression is None:
        return False
    if store_of(variable) is not None or getattr(variable, "is_large_table", False):
        return False
    is_float = jnp.issubdtype(jnp.dtype(variable.dtype), jnp.floating)
    return is_float and compression.compresses(tuple(variable.shape))
