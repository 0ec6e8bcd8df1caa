"""Data of which Keras is told nothing but how many batches there are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from stratagem.keras.private import DataAdapter

__all__ = ["UnreadData"]


class UnreadData(DataAdapter):
    """Data whose batches are not known before they are read; there is one kind of iterator."""

    @property
    def batch_size(self) -> None:
        """Not known before a batch is read."""
        return None

    @property
    def has_partial_batch(self) -> None:
        """Not known before a batch is read."""
        return None

    @property
    def partial_batch_size(self) -> None:
        """Not known before a batch is read."""
        return None

    def get_numpy_iterator(self) -> Iterator[Any]:
        """As `get_jax_iterator`."""
        return self.get_jax_iterator()
