"""Rows of tables by their ids: each once, summed, and dealt out to the shards that hold them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

__all__ = ["combine_rows", "parts_of_shards"]

# Ids that come at most so often are added up together.
_FEW = 8


def combine_rows(ids: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Adds up the rows of each id.

    Args:
        ids: integers of shape (k,), in any order, repeated or not.
        rows: of shape (k, ...).

    Returns:
        The ids in their order, each once, of shape (u,), and the sums, of shape (u, ...). Rows of
        one id are added in the order in which they came.

    Example:
        >>> from stratagem.parameter_server.server.rows import combine_rows
        >>> combine_rows(np.array([4, 1, 4]), np.array([[1.0], [2.0], [3.0]]))
        (array([1, 4]), array([[2.],
               [4.]]))
    """
    if not len(ids):
        return ids, rows
    order, ordered = _sorted(ids)
    is_first = np.empty(len(ids), bool)
    is_first[0] = True
    np.not_equal(ordered[1:], ordered[:-1], out=is_first[1:])
    if is_first.all():
        return ordered, np.take(rows, order, axis=0)
    starts = np.flatnonzero(is_first)
    counts = np.diff(starts, append=len(ids))
    sums = np.take(rows, order[starts], axis=0)
    # The second rows of all ids at once, then the third: `reduceat` takes 0.2 us for each id.
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


def _sorted(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The order of ids, first come first where they are equal, and the ids in it.

    Numbers are sorted many times as fast as pairs: each is made one of its id and its place.
    """
    bits = (len(ids) - 1).bit_length()
    if ids.dtype.kind not in "iu" or int(ids.min()) < 0 or int(ids.max()) >> (63 - bits):
        order = np.argsort(ids, kind="stable")
        return order, ids[order]
    keys = (ids.astype(np.int64) << bits) | np.arange(len(ids))
    keys.sort()
    return keys & ((1 << bits) - 1), (keys >> bits).astype(ids.dtype)


def parts_of_shards(ids: np.ndarray, rows_of_shards: Sequence[int]) -> list[slice]:
    """Says which ids belong to which shard.

    Args:
        ids: in their order, of shape (u,).
        rows_of_shards: how many consecutive rows each shard holds.

    Returns:
        For each shard the ids that are its own, as a slice.

    Example:
        >>> from stratagem.parameter_server.server.rows import parts_of_shards
        >>> parts_of_shards(np.array([0, 4, 5, 9]), [5, 5])
        [slice(0, 2, None), slice(2, 4, None)]
    """
    ends = np.searchsorted(ids, np.cumsum(rows_of_shards), side="left").tolist()
    return [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]
