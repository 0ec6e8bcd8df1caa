"""Sources that can be sharded: files, and datasets with a shard hint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from stratagem.input.sources.source import Reader, Source
from stratagem.messages import explain

SHARD_HINT = -1


class FileSource(Source):
    """A dataset that a function creates from a list of files."""

    def __init__(self, files: Sequence[Any], make: Callable[[list[Any]], Source]) -> None:
        if not files:
            raise ValueError(
                explain(
                    "The list of files is empty.",
                    expected="one or more files.",
                    fix="check the glob pattern or folder that lists them.",
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
        """Returns every `num_shards`th file from `index` on."""
        return FileSource(self._files[index::num_shards], self._make)

    @property
    def order_follows_epoch(self) -> bool:
        """Same as the dataset of the files."""
        return self._whole_source().order_follows_epoch

    @property
    def is_repeatable(self) -> bool:
        """True: files have the same contents each time, and a function must shuffle them alike."""
        return True

    @property
    def files(self) -> list[Any]:
        """The files."""
        return self._files

    def _whole_source(self) -> Source:
        if self._source is None:
            self._source = self._make(list(self._files))
        return self._source

    @property
    def cardinality(self) -> int:
        """Number of batches of the dataset of the files."""
        return self._whole_source().cardinality

    def open(self, epoch: int) -> Reader:
        """Opens the dataset of the files."""
        return self._whole_source().open(epoch)


class HintSource(Source):
    """A dataset with a shard hint, created from the number of shards and the index."""

    def __init__(self, make: Callable[[int, int], Source]) -> None:
        self._make = make
        self._whole: Source | None = None

    @property
    def has_shard_hint(self) -> bool:
        """True."""
        return True

    def shard(self, num_shards: int, index: int) -> Source:
        """Fills in the hint."""
        return self._make(num_shards, index)

    @property
    def order_follows_epoch(self) -> bool:
        """Same as the unsharded dataset."""
        return self._unsharded().order_follows_epoch

    @property
    def is_repeatable(self) -> bool:
        """Same as the unsharded dataset."""
        return self._unsharded().is_repeatable

    def _unsharded(self) -> Source:
        if self._whole is None:
            self._whole = self._make(1, 0)
        return self._whole

    @property
    def cardinality(self) -> int:
        """Number of batches of all examples."""
        return self._unsharded().cardinality

    def open(self, epoch: int) -> Reader:
        """Opens the unsharded dataset."""
        return self._unsharded().open(epoch)
