"""Wishes that consumers of a job send with each request for a batch."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from stratagem.input.batch_compression import AUTO, ZSTD, checked_compression, is_available


class ConsumerWishes:
    """Trainers of the consumers of a job, and whether it compresses their batches.

    Args:
        compression: of the job; see `checked_compression`.

    Raises:
        ImportError: the job needs zstandard, which is not installed.
    """

    def __init__(self, compression: str | None) -> None:
        self._compression = checked_compression(compression)
        self._last: dict[str, dict[str, Any]] = {}

    def note(self, fields: dict[str, Any]) -> None:
        """Notes the fields of a request."""
        self._last[fields["consumer"]] = fields

    def keep(self, consumers: Collection[str], num_joined: int) -> None:
        """Forgets other consumers of the first `num_joined`."""
        self._last = {
            name: last
            for name, last in self._last.items()
            if name in consumers or last["num_joined"] > num_joined
        }

    def num_joined(self, consumer: str) -> int:
        """Returns how many consumers had joined the job when this one did, with itself."""
        return self._last[consumer]["num_joined"]

    def trainer_of(self, consumer: str) -> str:
        """Returns the trainer of a consumer, in a job with a shared window."""
        return self._last[consumer]["trainer"]

    @property
    def is_compressed(self) -> bool:
        """True if the worker compresses the next batch.

        With "AUTO", it does if a consumer is on another machine.
        """
        if self._compression != AUTO:
            return self._compression == ZSTD
        return is_available() and any(last["compression"] for last in self._last.values())
