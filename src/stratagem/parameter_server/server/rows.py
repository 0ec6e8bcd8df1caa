"""Row ids of tables, and sums of rows with equal ids."""

from __future__ import annotations

import math

import numpy as np
from scipy.sparse import csc_array

# JAX uses an array in place only if its address is aligned to this.
_ALIGNMENT = 64


def combine_rows(ids: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sums rows with equal ids, and returns sorted unique ids and their sums.

    `ids` has shape (k,) in any order, `rows` shape (k, ...). Rows of one id are added in input
    order.
    """
    distinct, places = sorted_distinct(ids)
    return distinct, sum_rows(places, len(distinct), rows)


def sum_rows(places: np.ndarray, num_sums: int, rows: np.ndarray) -> np.ndarray:
    """Adds each row to the sum at its place, in input order.

    `places` has shape (k,), `rows` shape (k, ...), the result (num_sums, ...). Half-precision rows
    are added in single precision.
    """
    if not rows.size:
        return np.zeros((num_sums, *rows.shape[1:]), rows.dtype)
    flat = rows.reshape(len(rows), -1)
    if flat.dtype.kind in "fV" and flat.dtype.itemsize < 4:  # unknown to SciPy
        flat = flat.astype(np.float32)
    # A matrix with a single 1 per column: each row is read once, in order. NumPy needs copies.
    columns = np.arange(len(rows) + 1, dtype=places.dtype)
    matrix = csc_array((np.ones(len(rows), flat.dtype), places, columns), (num_sums, len(rows)))
    return (matrix @ flat).astype(rows.dtype, copy=False).reshape(num_sums, *rows.shape[1:])


def sorted_distinct(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the sorted distinct ids, and the position of each id among them."""
    order, ordered = _sorted(ids)
    is_first = np.ones(len(ids), np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=is_first[1:])
    places = np.empty(len(ids), np.intp)
    places[order] = np.cumsum(is_first) - 1
    return ordered[is_first], places


def _sorted(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the stable sort order of ids, and the sorted ids.

    Packs each id and its position into one integer if possible: integers sort many times faster
    than pairs.
    """
    bits = len(ids).bit_length()
    is_small = ids.dtype.kind in "iu" and len(ids) and ids.min() >= 0
    if not is_small or int(ids.max()) >> (63 - bits):
        order = np.argsort(ids, kind="stable")
        return order, ids[order]
    keys = (ids.astype(np.int64) << bits) | np.arange(len(ids))
    keys.sort()
    return keys & ((1 << bits) - 1), (keys >> bits).astype(ids.dtype)


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Returns an array at an address that JAX uses in place."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % _ALIGNMENT
    return memory[begin : begin + size].view(dtype).reshape(shape)
