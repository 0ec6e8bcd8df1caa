"""Sources of in-memory arrays and other indexable rows, with batching and shuffling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from stratagem.devices.mesh import is_explicit
from stratagem.errors import explain
from stratagem.input.sources.source import Reader, Source


class RowSource(Source):
    """Batches of rows selected by index.

    `take` returns the batch of an array of indices or a slice. `shuffle` reorders the rows in each
    epoch by `seed` and epoch. `is_in_memory` is that of the readers. `can_reshape` is True if the
    batches are NumPy arrays.
    """

    is_in_memory = False
    can_reshape = False

    @property
    def order_follows_epoch(self) -> bool:
        """True."""
        return True

    @property
    def can_seek(self) -> bool:
        """True."""
        return True

    def __init__(
        self,
        take: Callable[[Any], Any],
        num_rows: int,
        *,
        batch_size: int,
        shuffle: bool = False,
        seed: int = 0,
        drop_remainder: bool = False,
    ) -> None:
        if batch_size < 1:
            raise ValueError(
                explain(
                    f"batch_size={batch_size} is out of range.",
                    expected="1 or more examples.",
                    fix="pass the global batch size.",
                )
            )
        self.take = take
        self.num_rows = num_rows
        self.batch_size = batch_size
        self.drop_remainder = drop_remainder
        self._shuffle = shuffle
        self._seed = seed

    @property
    def cardinality(self) -> int:
        """Number of batches."""
        if self.drop_remainder:
            return self.num_rows // self.batch_size
        return -(-self.num_rows // self.batch_size)

    def order(self, epoch: int) -> np.ndarray[Any, Any] | None:
        """Returns the row indices in the order of an epoch, or None for the natural order."""
        if not self._shuffle:
            return None
        return np.random.default_rng([self._seed, epoch]).permutation(self.num_rows)

    def open(self, epoch: int) -> Reader:
        """Opens an epoch, which determines the order if the source shuffles."""
        return _RowReader(self, self.order(epoch))


class _RowReader(Reader):
    def __init__(self, source: RowSource, order: np.ndarray[Any, Any] | None) -> None:
        self._source = source
        self._order = order
        self.is_in_memory = source.is_in_memory

    def read(self) -> Any:
        if self.num_read >= self._source.cardinality:
            raise StopIteration
        start = self.num_read * self._source.batch_size
        stop = min(start + self._source.batch_size, self._source.num_rows)
        return self._source.take(self._rows(start, stop))

    def read_many(self, count: int, num_parts: int) -> tuple[Any, int] | None:
        size, first = self._source.batch_size, self.num_read
        count = min(count, self._source.num_rows // size - first)
        if count < 1 or size % num_parts or not self._source.can_reshape:
            return None
        rows = self._rows(first * size, (first + count) * size)
        batches = jax.tree.map(
            lambda leaf: leaf.reshape(count, size, *leaf.shape[1:]), self._source.take(rows)
        )
        return batches, count

    def _rows(self, start: int, stop: int) -> Any:
        return slice(start, stop) if self._order is None else self._order[start:stop]

    def restore(self, state: dict[str, Any]) -> None:
        self.num_read = state["num_read"]


def _has_rows(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and not is_explicit(leaf)


class ArraySource(RowSource):
    """A pytree of arrays of equal length, with examples on axis 0."""

    is_in_memory = True

    def __init__(self, arrays: object, **options: Any) -> None:
        arrays = jax.tree.map(lambda leaf: leaf if _has_rows(leaf) else np.asarray(leaf), arrays)
        shapes = [tuple(leaf.shape) for leaf in jax.tree.leaves(arrays)]
        if len({shape[:1] for shape in shapes}) != 1 or not shapes[0]:
            raise ValueError(
                explain(
                    f"A dataset cannot be made from arrays of shapes {shapes}.",
                    expected="arrays with the examples on axis 0, all of the same length.",
                    fix="make axis 0 of all arrays the same length.",
                )
            )
        self.arrays = arrays
        self.can_reshape = all(type(leaf) is np.ndarray for leaf in jax.tree.leaves(arrays))
        super().__init__(
            lambda rows: jax.tree.map(lambda leaf: leaf[rows], arrays), shapes[0][0], **options
        )
