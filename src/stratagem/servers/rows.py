"""Rows of tables by their ids: each once, summed, and dealt out to the shards that hold them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

__all__ = ["combine_rows", "parts_of_shards"]


def combine_rows(ids: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Adds up the rows of each id.

    Args:
        ids: integers of shape (k,), in any order, repeated or not.
        rows: of shape (k, ...).

    Returns:
        The ids in their order, each once, of shape (u,), and the sums, of shape (u, ...). Rows of
        one id are added in the order in which they came.

    Example:
        >>> from stratagem.servers.rows import combine_rows
        >>> combine_rows(np.array([4, 1, 4]), np.array([[1.0], [2.0], [3.0]]))
        (array([1, 4]), array([[2.],
               [4.]]))
    """
    if not len(ids):
        return ids, rows
    order = np.argsort(ids, kind="stable")
    ordered = ids[order]
    is_first = np.concatenate([[True], ordered[1:] != ordered[:-1]])
    if is_first.all():
        return ordered, rows[order]
    starts = np.flatnonzero(is_first)
    return ordered[starts], np.add.reduceat(rows[order], starts, axis=0)


def parts_of_shards(ids: np.ndarray, rows_of_shards: Sequence[int]) -> list[slice]:
    """Says which ids belong to which shard.

    Args:
        ids: in their order, of shape (u,).
        rows_of_shards: how many consecutive rows each shard holds.

    Returns:
        For each shard the ids that are its own, as a slice.

    Example:
        >>> from stratagem.servers.rows import parts_of_shards
        >>> parts_of_shards(np.array([0, 4, 5, 9]), [5, 5])
        [slice(0, 2, None), slice(2, 4, None)]
    """
    ends = np.searchsorted(ids, np.cumsum(rows_of_shards), side="left").tolist()
    return [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]
