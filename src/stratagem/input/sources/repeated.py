"""Sources read several times, one epoch after the other, as if they were one longer source."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stratagem.input.sources.source import INFINITE_CARDINALITY, Reader, Source
from stratagem.messages import explain
from stratagem.options import AutoShardPolicy

__all__ = ["RepeatedReader", "RepeatedSource", "check_count", "repeated_cardinality"]


def check_count(count: Any) -> int | None:
    """Returns how often a dataset is repeated; None for without end.

    Raises:
        TypeError: not an int or None.
        ValueError: below -1.
    """
    if count is None:
        return None
    if not isinstance(count, int) or isinstance(count, bool):
        raise TypeError(
            explain(
                f"repeat received count={count!r} of type {type(count).__name__}.",
                expected="an int, or None for a dataset without end.",
                fix="pass the number of epochs.",
            )
        )
    if count < -1:
        raise ValueError(
            explain(
                f"repeat received count={count}.",
                expected="0 or more; None or -1 for a dataset without end.",
                fix="pass the number of epochs.",
            )
        )
    return None if count == -1 else count


def repeated_cardinality(cardinality: int, count: int | None) -> int:
    """Returns the length of a repeated dataset, by TensorFlow's rules for lengths.

    Source: TF 2.21 core/kernels/data/repeat_dataset_op.cc, CardinalityInternal.
    """
    if count is None:
        return INFINITE_CARDINALITY if cardinality else 0
    return cardinality if count and cardinality < 0 else cardinality * count


class RepeatedSource(Source):
    """A source read `count` times; epoch e of it is the epochs e * count and on of the source.

    Args:
        source: the source.
        count: how often; None for without end.
    """

    def __init__(self, source: Source, count: int | None) -> None:
        self._source = source
        self._count = count

    @property
    def order_follows_epoch(self) -> bool:
        """As of the source."""
        return self._source.order_follows_epoch

    @property
    def cardinality(self) -> int:
        """Number of batches of all repetitions."""
        return repeated_cardinality(self._source.cardinality, self._count)

    @property
    def num_files(self) -> int | None:
        """As of the source."""
        return self._source.num_files

    @property
    def has_shard_hint(self) -> bool:
        """As of the source."""
        return self._source.has_shard_hint

    @property
    def auto_shard_policy(self) -> AutoShardPolicy:
        """As of the source."""
        return self._source.auto_shard_policy

    def shard(self, num_shards: int, index: int) -> Source:
        """Returns the repeated shard of the source."""
        return RepeatedSource(self._source.shard(num_shards, index), self._count)

    def element_spec(self) -> Any:
        """As of the source."""
        return self._source.element_spec()

    def open(self, epoch: int) -> Reader:
        """Begins to read the first repetition."""
        return RepeatedReader(self._source.open, epoch, self._count)


class RepeatedReader(Reader):
    """Reads one epoch after the other.

    Args:
        open_epoch: given the number of an epoch, begins to read it.
        epoch: of the repeated dataset.
        count: how many epochs of the source it has; None for without end.
    """

    def __init__(self, open_epoch: Callable[[int], Reader], epoch: int, count: int | None) -> None:
        self._open = open_epoch
        self._first = epoch * (1 if count is None else count)
        self._count = count
        self._num_ended = 0
        self._reader = open_epoch(self._first)
        self._is_empty = True  # the epoch that is read has given no batch yet
        self.has_cheap_state = self._reader.has_cheap_state

    def read(self) -> Any:
        """Returns the next batch, of the next epoch where one has ended."""
        while self._count is None or self._num_ended < self._count:
            try:
                batch = next(self._reader)
            except StopIteration:
                if self._is_empty and self._count is None:
                    raise  # an empty source, which would be read for ever
                self._go_to(self._num_ended + 1)
                continue
            self._is_empty = False
            return batch
        raise StopIteration

    def _go_to(self, num_ended: int) -> None:
        self._num_ended, self._is_empty = num_ended, True
        self._reader.close()
        if self._count is None or num_ended < self._count:
            self._reader = self._open(self._first + num_ended)

    def state(self) -> Any:
        """Returns the epoch, and the place in it."""
        return {"num_ended": self._num_ended, "source": self._reader.state()}

    def restore(self, state: Any) -> None:
        """Goes to the epoch, and to the place in it."""
        self._go_to(state["num_ended"])
        if self._count is None or self._num_ended < self._count:
            self._reader.restore(state["source"])
            self._is_empty = False  # it may stand at the end of an epoch that had batches

    def close(self) -> None:
        """Closes the reader of the epoch."""
        self._reader.close()
