"""Arrays in memory, or anything with rows, cut into batches and shuffled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from stratagem.input.sources.source import Reader, Source
from stratagem.messages import explain

__all__ = ["ArraySource", "RowSource"]


class RowSource(Source):
    """Rows that can be asked for by their indices.

    Args:
        take: given an array of indices, or a slice, returns the batch of these rows.
        num_rows: how many rows there are.
        batch_size: rows of a batch.
        shuffle: a new order in each epoch.
        seed: of the order.
        drop_remainder: leave out a last batch that is short.
    """

    @property
    def order_follows_epoch(self) -> bool:
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
                    f"batch_size={batch_size}.",
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
        """Returns the order of the rows in an epoch.

        Args:
            epoch: from 0.

        Returns:
            Indices; None for the order as they are.
        """
        if not self._shuffle:
            return None
        return np.random.default_rng([self._seed, epoch]).permutation(self.num_rows)

    def open(self, epoch: int) -> Reader:
        """Begins to read from the beginning.

        Args:
            epoch: decides the order, if it shuffles.

        Returns:
            The reader.
        """
        return _RowReader(self, self.order(epoch))


class _RowReader(Reader):
    def __init__(self, source: RowSource, order: np.ndarray[Any, Any] | None) -> None:
        self._source = source
        self._order = order

    def read(self) -> Any:
        if self.num_read >= self._source.cardinality:
            raise StopIteration
        start = self.num_read * self._source.batch_size
        stop = min(start + self._source.batch_size, self._source.num_rows)
        rows = slice(start, stop) if self._order is None else self._order[start:stop]
        return self._source.take(rows)

    def restore(self, state: Any) -> None:
        self.num_read = state["num_read"]


class ArraySource(RowSource):
    """A pytree of arrays with the examples on axis 0.

    Args:
        arrays: at least one; all of the same length.
        **options: of `RowSource`.

    Raises:
        ValueError: no arrays, one without axes, or arrays of different lengths.
    """

    def __init__(self, arrays: Any, **options: Any) -> None:
        arrays = jax.tree.map(
            lambda leaf: leaf if hasattr(leaf, "shape") else np.asarray(leaf), arrays
        )
        shapes = [tuple(leaf.shape) for leaf in jax.tree.leaves(arrays)]
        if len({shape[:1] for shape in shapes}) != 1 or not shapes[0]:
            raise ValueError(
                explain(
                    f"A dataset of arrays of the shapes {shapes} was asked for.",
                    expected="arrays with the examples on axis 0, all of one length.",
                    fix="make their first axes equal.",
                )
            )
        super().__init__(
            lambda rows: jax.tree.map(lambda leaf: leaf[rows], arrays), shapes[0][0], **options
        )
