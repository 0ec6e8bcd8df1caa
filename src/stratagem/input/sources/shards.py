"""Sources that can be read in parts: files, and datasets with a place for a shard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from stratagem.input.sources.source import Reader, Source
from stratagem.messages import explain

__all__ = ["FileSource", "HintSource", "SHARD_HINT"]

SHARD_HINT = -1


class FileSource(Source):
    """A dataset of batches that a function makes of a list of files.

    Args:
        files: their names.
        make: given some of the files, returns the source that reads them.

    Raises:
        ValueError: no files.
    """

    def __init__(self, files: Sequence[Any], make: Callable[[list[Any]], Source]) -> None:
        if not files:
            raise ValueError(
                explain(
                    "A dataset of no files was asked for.",
                    expected="one or more.",
                    fix="check the pattern that finds them.",
                )
            )
        self._files = list(files)
        self._make = make
        self._source: Source | None = None

    @property
    def num_files(self) -> int:
        """Number of files."""
        return len(self._files)

    def shard(self, num_shards: int, index: int) -> Source:
        """Returns every `num_shards`th file from `index` on.

        Args:
            num_shards: 1 or more.
            index: 0 <= index < num_shards.

        Returns:
            The source.
        """
        return FileSource(self._files[index::num_shards], self._make)

    @property
    def order_follows_epoch(self) -> bool:
        """As of the dataset of the files."""
        return self._made().order_follows_epoch

    def _made(self) -> Source:
        if self._source is None:
            self._source = self._make(list(self._files))
        return self._source

    @property
    def cardinality(self) -> int:
        """Number of batches, as the dataset of the files tells it."""
        return self._made().cardinality

    def open(self, epoch: int) -> Reader:
        """Begins to read from the beginning.

        Args:
            epoch: handed to the dataset of the files.

        Returns:
            The reader.
        """
        return self._made().open(epoch)


class HintSource(Source):
    """A dataset whose shard is chosen by whoever distributes it.

    Args:
        make: given the number of shards and which one, returns the source that reads it.
    """

    def __init__(self, make: Callable[[int, int], Source]) -> None:
        self._make = make
        self._whole: Source | None = None

    @property
    def has_shard_hint(self) -> bool:
        """True."""
        return True

    def shard(self, num_shards: int, index: int) -> Source:
        """Fills the hint in.

        Args:
            num_shards: 1 or more.
            index: 0 <= index < num_shards.

        Returns:
            The source.
        """
        return self._make(num_shards, index)

    @property
    def order_follows_epoch(self) -> bool:
        """As of the dataset."""
        return self._of_one().order_follows_epoch

    def _of_one(self) -> Source:
        if self._whole is None:
            self._whole = self._make(1, 0)
        return self._whole

    @property
    def cardinality(self) -> int:
        """Number of batches of all examples."""
        return self._of_one().cardinality

    def open(self, epoch: int) -> Reader:
        """Begins to read all examples.

        Args:
            epoch: handed to the dataset.

        Returns:
            The reader.
        """
        return self._of_one().open(epoch)
