"""Choice of the variables whose gradients are sent compressed."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from stratagem.devices.compression import Compression
from stratagem.variables.store import store_of


def is_compressed(variable: Any, compression: Compression | None) -> bool:
    """Returns True if gradients of a variable are sent compressed: the only place that decides.

    Args:
        variable: a trained variable.
        compression: of the strategy; None compresses nothing.
    """
    if compression is None or not is_compressible(variable):
        return False
    return compression.compresses(tuple(variable.shape))


def is_compressible(variable: Any) -> bool:
    """Returns True if gradients of a variable are summed as whole arrays of floats."""
    if store_of(variable) is not None or getattr(variable, "is_large_table", False):
        return False
    return jnp.issubdtype(jnp.dtype(variable.dtype), jnp.floating)
