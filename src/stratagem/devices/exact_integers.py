"""Check of 64-bit integers before JAX makes them 32-bit ones without a word."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from stratagem.errors import explain

# Letters of the dtypes of 64-bit integers: on some systems, there are two of each.
_WIDE = frozenset(np.dtype(kind).char for kind in ("int64", "uint64", "l", "L", "q", "Q"))
_OF_HOST = (np.ndarray, np.generic)


def require_exact_integers(
    arrays: Iterable[object], name_of: Callable[[int], str] | None = None
) -> None:
    """Raises OverflowError if JAX would change a value of an array of the host.

    Without `jax_enable_x64`, JAX keeps only the lower 32 bits of an integer: another row of a table
    would be read and trained. `name_of` returns the name of an array by its position.
    """
    for place, array in enumerate(arrays):
        # By the letter: that is faster than the kind and the size of the dtype.
        if isinstance(array, _OF_HOST) and array.dtype.char in _WIDE and not _is_exact(array):
            raise _changed_values(array, "An array" if name_of is None else name_of(place))


def _is_exact(array: Any) -> bool:
    kept = jax.dtypes.canonicalize_dtype(array.dtype)
    if kept == array.dtype or not array.size:
        return True
    lowest, highest = _limits(kept)
    return bool(array.min() >= lowest and array.max() <= highest)


@functools.cache
def _limits(dtype: np.dtype[Any]) -> tuple[int, int]:
    limits = np.iinfo(dtype)
    return int(limits.min), int(limits.max)


def _changed_values(array: Any, name: str) -> OverflowError:
    """Returns the error. It never contains the values: they may be ids of people."""
    kept = jax.dtypes.canonicalize_dtype(array.dtype)
    lowest, highest = _limits(kept)
    count = int(np.count_nonzero((array < lowest) | (array > highest)))
    return OverflowError(
        explain(
            f"{name} has dtype {array.dtype} and shape {array.shape}. {count} of its values do not "
            f"fit {kept}.",
            expected=f"values from {lowest} to {highest}: JAX keeps only the lower 32 bits of "
            "others.",
            fix="pass row numbers below 2**31, for example ids mapped by a vocabulary or a hash. "
            "Pass 64-bit keys as pairs of 32 bits, ids[..., None].view('uint32'). Cast numbers "
            "such as times to floats, and drop columns that the model does not use.",
            code="SG311",
        )
    )
