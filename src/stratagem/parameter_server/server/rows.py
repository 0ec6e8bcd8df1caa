"""Row ids of tables: sums of rows with equal ids, and partitioning by shard."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

__all__ = ["aligned_empty", "combine_rows", "parts_of_shards", "sorted_ids"]

# Ids that occur at most this often are summed together, one occurrence at a time.
_FEW = 8
# JAX uses an array in place only if its address is aligned to this.
_ALIGNMENT = 64


def combine_rows(ids: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sums rows with equal ids, and returns sorted unique ids and their sums.

    `ids` has shape (k,) in any order, `rows` shape (k, ...). Rows of one id are added in input
    order.
    """
    if not len(ids):
        return ids, rows
    order, ordered = sorted_ids(ids)
    is_first = np.empty(len(ids), bool)
    is_first[0] = True
    np.not_equal(ordered[1:], ordered[:-1], out=is_first[1:])
    if is_first.all():
        return ordered, np.take(rows, order, axis=0)
    starts = np.flatnonzero(is_first)
    counts = np.diff(starts, append=len(ids))
    sums = np.take(rows, order[starts], axis=0)
    # Add the second rows of all ids at once, then the third: `reduceat` costs 0.2 us per id.
    again = np.flatnonzero((counts > 1) & (counts <= _FEW))
    for place in range(1, _FEW):
        sums[again] += np.take(rows, order[starts[again] + place], axis=0)
        again = again[counts[again] > place + 1]
    many = np.flatnonzero(counts > _FEW)
    if len(many):
        of_many = np.take(rows, order[np.repeat(counts > _FEW, counts)], axis=0)
        begins = np.cumsum(counts[many]) - counts[many]
        sums[many] = np.add.reduceat(of_many, begins, axis=0)
    return ordered[starts], sums


def sorted_ids(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the stable sort order of ids, and the sorted ids.

    Packs each id and its position into one integer if possible: integers sort many times faster
    than pairs.
    """
    bits = (len(ids) - 1).bit_length()
    if ids.dtype.kind not in "iu" or int(ids.min()) < 0 or int(ids.max()) >> (63 - bits):
        order = np.argsort(ids, kind="stable")
        return order, ids[order]
    keys = (ids.astype(np.int64) << bits) | np.arange(len(ids))
    keys.sort()
    return keys & ((1 << bits) - 1), (keys >> bits).astype(ids.dtype)


def parts_of_shards(ids: np.ndarray, rows_of_shards: Sequence[int]) -> list[slice]:
    """Returns the slice of sorted `ids` that falls in each shard.

    `rows_of_shards` is the number of consecutive rows in each shard.
    """
    ends = np.searchsorted(ids, np.cumsum(rows_of_shards), side="left").tolist()
    return [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Returns an array at an address that JAX uses in place."""
    size = int(np.prod(shape)) * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % _ALIGNMENT
    return memory[begin : begin + size].view(dtype).reshape(shape)
