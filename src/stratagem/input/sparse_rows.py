"""Sparse matrices of a batch as rows: arrays that are split, padded and stacked like all others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import sparse

__all__ = ["SparseRows", "with_sparse_arrays", "with_sparse_rows"]


@jax.tree_util.register_pytree_node_class
class SparseRows:
    """A sparse array, the same number of entries in each row.

    A pytree that becomes a BCOO array where it is made of JAX's arrays, as in a replica function.

    Args:
        values: entries, shape (rows, entries).
        indices: where they are in their row, shape (rows, entries, rank - 1); those that only fill
            a row up are out of bounds.
        shape: of a row.
    """

    def __init__(self, values: Any, indices: Any, shape: tuple[int, ...]) -> None:
        self.values = values
        self.indices = indices
        self.shape = shape

    def __repr__(self) -> str:
        return f"SparseRows({self.values}, {self.indices}, {self.shape})"

    def tree_flatten(self) -> tuple[tuple[Any, Any], tuple[int, ...]]:
        """Returns both arrays, and the shape of a row."""
        return (self.values, self.indices), self.shape

    @classmethod
    def tree_unflatten(cls, shape: tuple[int, ...], arrays: Sequence[Any]) -> Any:
        """Returns a BCOO array, or these rows where the parts are not arrays."""
        values, indices = arrays
        if isinstance(values, jax.Array) and values.ndim == 2 and isinstance(indices, jax.Array):
            return _joined(values, indices, shape)
        return cls(values, indices, shape)


def _joined(values: jax.Array, indices: jax.Array, shape: tuple[int, ...]) -> Any:
    num_rows, width = values.shape
    row = jnp.broadcast_to(
        jnp.arange(num_rows, dtype=indices.dtype)[:, None, None], (num_rows, width, 1)
    )
    row = jnp.where(indices[..., :1] < shape[0], row, num_rows)  # wholly out of bounds, as JAX does
    joined = jnp.concatenate([row, indices], axis=-1).reshape(num_rows * width, len(shape) + 1)
    return sparse.BCOO((values.reshape(-1), joined), shape=(num_rows, *shape))


def with_sparse_arrays(batch: Any) -> Any:
    """Returns a pytree with BCOO arrays in the places of `SparseRows` of arrays on the host."""

    def joined(leaf: Any) -> Any:
        if not isinstance(leaf, SparseRows):
            return leaf
        return _joined(jnp.asarray(leaf.values), jnp.asarray(leaf.indices), leaf.shape)

    return jax.tree.map(joined, batch, is_leaf=lambda leaf: isinstance(leaf, SparseRows))


def with_sparse_rows(parts: Sequence[Any]) -> list[Any]:
    """Returns batches with `SparseRows` in the places of sparse arrays, equally wide in all.

    Args:
        parts: pytrees of one structure, with arrays of SciPy, JAX (BCOO, BCSR) or TensorFlow.
    """
    flat = [jax.tree.flatten(part, is_leaf=_is_sparse) for part in parts]
    if not any(_is_sparse(leaf) for leaves, _ in flat for leaf in leaves):
        return list(parts)
    columns = [
        _rows_of(column) if any(map(_is_sparse, column)) else column
        for column in zip(*(leaves for leaves, _ in flat), strict=True)
    ]
    rows = zip(*columns, strict=True)
    return [
        jax.tree.unflatten(structure, leaves)
        for (_, structure), leaves in zip(flat, rows, strict=True)
    ]


def _is_sparse(leaf: Any) -> bool:
    if isinstance(leaf, sparse.BCOO | sparse.BCSR):
        return True
    kind = type(leaf)
    return kind.__module__.startswith("scipy.sparse") or kind.__name__ in _OF_TENSORFLOW


# What tf.data yields, as tensors and as NumPy.
_OF_TENSORFLOW = ("SparseTensor", "SparseTensorValue")


def _rows_of(column: Sequence[Any]) -> list[Any]:
    entries = [_entries(leaf) for leaf in column]
    counts = [np.bincount(where[:, 0], minlength=1).max() for _, where, _ in entries]
    width = 1 << max(int(max(counts)) - 1, 0).bit_length()  # few widths are few programs
    return [_filled(values, where, shape, width) for values, where, shape in entries]


def _entries(leaf: Any) -> tuple[Any, Any, tuple[int, ...]]:
    """The values of a sparse array, where they are, and its shape, on the host."""
    if isinstance(leaf, sparse.BCSR):
        leaf = leaf.to_bcoo()
    if isinstance(leaf, sparse.BCOO):
        leaf = sparse.bcoo_update_layout(leaf, n_batch=0, n_dense=0)
        values, where, shape = leaf.data, leaf.indices, leaf.shape
    elif type(leaf).__name__ in _OF_TENSORFLOW:
        values, where, shape = leaf.values, leaf.indices, leaf.dense_shape
    else:
        leaf = leaf.tocoo()
        values, where, shape = leaf.data, np.stack([leaf.row, leaf.col], axis=1), leaf.shape
    shape = tuple(int(size) for size in shape)
    values, where = np.asarray(values), np.asarray(where)
    is_there = (where < np.asarray(shape)).all(axis=1)
    return values[is_there], where[is_there], shape


def _filled(values: Any, where: Any, shape: tuple[int, ...], width: int) -> SparseRows:
    order = np.argsort(where[:, 0], kind="stable")
    values, where = values[order], where[order]
    row = where[:, 0]
    place = np.arange(len(row)) - np.searchsorted(row, row)
    of_rows = np.zeros((shape[0], width), values.dtype)
    indices = np.broadcast_to(np.asarray(shape[1:], "int32"), (shape[0], width, len(shape) - 1))
    indices = indices.copy()  # out of bounds, as JAX marks an entry that is none
    of_rows[row, place] = values
    indices[row, place] = where[:, 1:]
    return SparseRows(of_rows, indices, shape[1:])
