"""Base of data adapters that give Keras only the number of batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from stratagem.keras.private import DataAdapter
from stratagem.keras.private.iterators import grouped


class UnreadData(DataAdapter):
    """Data adapter without batch sizes, and with one kind of iterator."""

    @property
    def batch_size(self) -> None:
        """None: unknown before a batch is read."""
        return None

    @property
    def has_partial_batch(self) -> None:
        """None: unknown before a batch is read."""
        return None

    @property
    def partial_batch_size(self) -> None:
        """None: unknown before a batch is read."""
        return None

    def batches(self) -> Iterator[Any]:
        """Returns an iterator over the batches of an epoch."""
        raise NotImplementedError

    def get_jax_iterator(self, super_batch: int | None = None) -> Iterator[Any]:
        """Returns the batches; from Keras 3.16 on, in groups of `super_batch` for its scan."""
        return grouped(self.batches(), super_batch)

    def get_numpy_iterator(self) -> Iterator[Any]:
        """Returns the batches."""
        return self.batches()
