"""`IndexedSlices`: rows of an array by index, such as the gradient of an embedding."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from stratagem.devices.shards import require_exact_integers
from stratagem.errors import explain


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True, eq=False)
class IndexedSlices:
    """Rows of an array that is zero elsewhere; rows with equal indices are summed.

    Args:
        values: the rows, of shape (k, ...) and any numeric dtype.
        indices: int array of shape (k,), positions on axis 0 of the dense array. Indices past the
            end are ignored.
        dense_shape: shape of the dense array, (n, ...), or None if not needed.

    Example:
        >>> rows = sg.IndexedSlices(jax.numpy.ones((2, 2)), jax.numpy.array([0, 0]), (2, 2))
        >>> rows.to_dense()
        Array([[2., 2.],
               [0., 0.]], dtype=float32)

    Source: TF 2.21 indexed_slices.py, IndexedSlices.
    """

    values: Any
    indices: Any
    dense_shape: tuple[int, ...] | None = None

    def tree_flatten(self) -> tuple[tuple[Any, Any], Any]:
        """Returns the arrays for JAX; `dense_shape` is static."""
        return (self.values, self.indices), self.dense_shape

    @classmethod
    def tree_unflatten(
        cls, dense_shape: tuple[int, ...] | None, children: Sequence[Any]
    ) -> IndexedSlices:
        """Rebuilds a value from the result of `tree_flatten`."""
        values, indices = children
        return cls(values, indices, dense_shape)

    def to_dense(self) -> jax.Array:
        """Returns the dense array.

        Returns:
            Array of shape `dense_shape`, in the dtype of the rows.

        Raises:
            ValueError: `dense_shape` is None, or `values` and `indices` do not match.
            TypeError: `indices` are not integers.
            OverflowError: 64-bit indices that JAX would change.
        """
        self.check()
        if self.dense_shape is None:
            raise ValueError(
                explain(
                    "IndexedSlices without dense_shape cannot be converted to a dense array.",
                    expected="the shape of the array that the rows belong to.",
                    fix="pass dense_shape=variable.shape.",
                )
            )
        values = jnp.asarray(self.values)
        whole = jnp.zeros(self.dense_shape, values.dtype)
        return whole.at[self._device_indices()].add(values, mode="drop")

    def combined(self) -> IndexedSlices:
        """Sums the rows with equal indices.

        Returns:
            Slices sorted by index, each index once. In a compiled program, whose shapes are static,
            as many rows as before: unused ones are zero, with an index past every end.

        Raises:
            ValueError: `values` and `indices` do not match.
            TypeError: `indices` are not integers.
            OverflowError: 64-bit indices that JAX would change.
        """
        self.check()
        indices = self._device_indices()
        if self.dense_shape is not None:  # -1 is the last row
            indices = jnp.where(indices < 0, indices + self.dense_shape[0], indices)
        nowhere = int(jnp.iinfo(indices.dtype).max)
        size = indices.shape[0] if isinstance(indices, Tracer) else None
        unique, inverse = jnp.unique(
            indices, return_inverse=True, size=size, fill_value=None if size is None else nowhere
        )
        sums = jax.ops.segment_sum(jnp.asarray(self.values), inverse, num_segments=unique.shape[0])
        return IndexedSlices(sums, unique, self.dense_shape)

    def _device_indices(self) -> jax.Array:
        require_exact_integers([self.indices], lambda _: "An array of indices")
        return jnp.asarray(self.indices)

    def check(self) -> None:
        """Raises if the parts do not match; see `to_dense`."""
        shape, indices_shape = jnp.shape(self.values), jnp.shape(self.indices)
        if len(indices_shape) != 1 or shape[:1] != indices_shape:
            raise ValueError(
                explain(
                    f"IndexedSlices have values of shape {shape} and indices of shape "
                    f"{indices_shape}.",
                    expected="one index per row: shapes (k, ...) and (k,).",
                    fix="flatten the indices to (k,), and reshape the values to (k, ...).",
                )
            )
        if self.dense_shape is not None and shape[1:] != tuple(self.dense_shape[1:]):
            raise ValueError(
                explain(
                    f"IndexedSlices have rows of shape {shape[1:]} and "
                    f"dense_shape={self.dense_shape}.",
                    expected=f"rows of shape {tuple(self.dense_shape[1:])}.",
                    fix="pass the shape of the array that the rows belong to.",
                )
            )
        dtype = getattr(self.indices, "dtype", None) or np.asarray(self.indices).dtype
        if not jnp.issubdtype(dtype, jnp.integer):
            raise TypeError(
                explain(
                    f"IndexedSlices have indices of dtype {dtype}.",
                    expected="integers.",
                    fix="use dataclasses.replace(slices, values=...) to change the values: "
                    "jax.tree.map applies to the indices, too.",
                )
            )

    def __jax_array__(self) -> jax.Array:
        return self.to_dense()


def is_indexed_slices(value: object) -> bool:
    """Returns True for `IndexedSlices`; for use as `is_leaf`."""
    return isinstance(value, IndexedSlices)
