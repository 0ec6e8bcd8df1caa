"""Base of data adapters that give Keras only the number of batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from stratagem.keras.private import DataAdapter

__all__ = ["UnreadData"]


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

    def get_numpy_iterator(self) -> Iterator[Any]:
        """Returns `get_jax_iterator()`."""
        return self.get_jax_iterator()
