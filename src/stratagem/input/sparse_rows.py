"""Conversion of sparse arrays to rows of equal width, which split and pad like dense arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import sparse


@jax.tree_util.register_pytree_node_class
class SparseRows:
    """A sparse array with the same number of entries in each row.

    A pytree that becomes a BCOO array when its leaves are JAX arrays, as in a replica function.
    `values` have shape (rows, entries), `indices` (rows, entries, rank - 1); padding indices are
    out of bounds. `shape` is the shape of a row.
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
        """Returns a BCOO array, or `SparseRows` if the leaves are not JAX arrays."""
        values, indices = arrays
        if isinstance(values, jax.Array) and values.ndim == 2 and isinstance(indices, jax.Array):
            return _to_bcoo(values, indices, shape)
        return cls(values, indices, shape)


def _to_bcoo(values: jax.Array, indices: jax.Array, shape: tuple[int, ...]) -> Any:
    num_rows, width = values.shape
    row = jnp.broadcast_to(
        jnp.arange(num_rows, dtype=indices.dtype)[:, None, None], (num_rows, width, 1)
    )
    row = jnp.where(indices[..., :1] < shape[0], row, num_rows)  # Out of bounds on all axes.
    joined = jnp.concatenate([row, indices], axis=-1).reshape(num_rows * width, len(shape) + 1)
    return sparse.BCOO((values.reshape(-1), joined), shape=(num_rows, *shape))


def with_sparse_arrays(batch: object) -> Any:
    """Replaces the `SparseRows` of a host batch by BCOO arrays."""

    def joined(leaf: object) -> Any:
        if not isinstance(leaf, SparseRows):
            return leaf
        return _to_bcoo(jnp.asarray(leaf.values), jnp.asarray(leaf.indices), leaf.shape)

    return jax.tree.map(joined, batch, is_leaf=lambda leaf: isinstance(leaf, SparseRows))


def with_sparse_rows(parts: Sequence[Any]) -> list[Any]:
    """Replaces sparse arrays of SciPy, JAX or TensorFlow by equally wide `SparseRows`."""
    flat = [jax.tree.flatten(part, is_leaf=is_sparse) for part in parts]
    if not any(is_sparse(leaf) for leaves, _ in flat for leaf in leaves):
        return list(parts)
    columns = [
        _rows_of(column) if any(map(is_sparse, column)) else column
        for column in zip(*(leaves for leaves, _ in flat), strict=True)
    ]
    rows = zip(*columns, strict=True)
    return [
        jax.tree.unflatten(structure, leaves)
        for (_, structure), leaves in zip(flat, rows, strict=True)
    ]


def is_sparse(leaf: object) -> bool:
    """Returns True for a sparse array of JAX, SciPy or TensorFlow."""
    if type(leaf) is np.ndarray:  # most are
        return False
    if isinstance(leaf, sparse.BCOO | sparse.BCSR):
        return True
    kind = type(leaf)
    return kind.__module__.startswith("scipy.sparse") or kind.__name__ in _TENSORFLOW_TYPES


# Sparse values of tf.data, as tensors and as NumPy.
_TENSORFLOW_TYPES = ("SparseTensor", "SparseTensorValue")


def _rows_of(column: Sequence[Any]) -> list[Any]:
    entries = [_entries(leaf) for leaf in column]
    counts = [np.bincount(where[:, 0], minlength=1).max() for _, where, _ in entries]
    width = 1 << max(int(max(counts)) - 1, 0).bit_length()  # Powers of two: fewer programs.
    return [_to_rows(values, where, shape, width) for values, where, shape in entries]


def _entries(leaf: Any) -> tuple[Any, Any, tuple[int, ...]]:
    """Returns the values, indices and shape of a sparse array on the host."""
    if isinstance(leaf, sparse.BCSR):
        leaf = leaf.to_bcoo()
    if isinstance(leaf, sparse.BCOO):
        leaf = sparse.bcoo_update_layout(leaf, n_batch=0, n_dense=0)
        values, where, shape = leaf.data, leaf.indices, leaf.shape
    elif type(leaf).__name__ in _TENSORFLOW_TYPES:
        values, where, shape = leaf.values, leaf.indices, leaf.dense_shape
    else:
        leaf = leaf.tocoo()
        values, where, shape = leaf.data, np.stack([leaf.row, leaf.col], axis=1), leaf.shape
    shape = tuple(int(size) for size in shape)
    values, where = np.asarray(values), np.asarray(where)
    is_entry = (where < np.asarray(shape)).all(axis=1)
    return values[is_entry], where[is_entry], shape


def _to_rows(
    values: np.ndarray, where: np.ndarray, shape: tuple[int, ...], width: int
) -> SparseRows:
    order = np.argsort(where[:, 0], kind="stable")
    values, where = values[order], where[order]
    row = where[:, 0]
    column = np.arange(len(row)) - np.searchsorted(row, row)
    row_values = np.zeros((shape[0], width), values.dtype)
    indices = np.broadcast_to(np.asarray(shape[1:], "int32"), (shape[0], width, len(shape) - 1))
    indices = indices.copy()  # Out of bounds: JAX's mark of padding.
    row_values[row, column] = values
    indices[row, column] = where[:, 1:]
    return SparseRows(row_values, indices, shape[1:])
