"""Sources that repeat another source, one epoch after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stratagem.errors import explain
from stratagem.input.sources.source import INFINITE_CARDINALITY, Reader, Source
from stratagem.options import AutoShardPolicy


def check_count(count: object) -> int | None:
    """Returns a valid repeat count, or None to repeat forever."""
    if count is None:
        return None
    if not isinstance(count, int) or isinstance(count, bool):
        raise TypeError(
            explain(
                f"repeat received count={count!r} of type {type(count).__name__}.",
                expected="an int, or None to repeat forever.",
                fix="pass the number of epochs.",
            )
        )
    if count < -1:
        raise ValueError(
            explain(
                f"repeat received count={count}.",
                expected="0 or more; None or -1 to repeat forever.",
                fix="pass the number of epochs.",
            )
        )
    return None if count == -1 else count


def repeated_cardinality(cardinality: int, count: int | None) -> int:
    """Returns the length of a repeated dataset, with TensorFlow's rules for unknown lengths.

    Source: TF 2.21 core/kernels/data/repeat_dataset_op.cc, CardinalityInternal.
    """
    if count is None:
        return INFINITE_CARDINALITY if cardinality else 0
    return cardinality if count and cardinality < 0 else cardinality * count


class RepeatedSource(Source):
    """A source repeated `count` times, or forever if None.

    Its epoch e starts at epoch e * count of the source.
    """

    def __init__(self, source: Source, count: int | None) -> None:
        self._source = source
        self._count = count

    @property
    def once(self) -> Source:
        """The source that is repeated."""
        return self._source

    @property
    def count(self) -> int | None:
        """Number of repetitions; None if there is no end."""
        return self._count

    @property
    def order_follows_epoch(self) -> bool:
        """Same as the source."""
        return self._source.order_follows_epoch

    @property
    def is_repeatable(self) -> bool:
        """Same as the source."""
        return self._source.is_repeatable

    @property
    def cardinality(self) -> int:
        """Number of batches of all repetitions."""
        return repeated_cardinality(self._source.cardinality, self._count)

    @property
    def num_files(self) -> int | None:
        """Same as the source."""
        return self._source.num_files

    @property
    def has_shard_hint(self) -> bool:
        """Same as the source."""
        return self._source.has_shard_hint

    @property
    def auto_shard_policy(self) -> AutoShardPolicy:
        """Same as the source."""
        return self._source.auto_shard_policy

    def shard(self, num_shards: int, index: int) -> Source:
        """Returns the repeated shard of the source."""
        return RepeatedSource(self._source.shard(num_shards, index), self._count)

    def element_spec(self) -> Any:
        """Same as the source."""
        return self._source.element_spec()

    def open(self, epoch: int) -> Reader:
        """Opens the first repetition."""
        return RepeatedReader(self._source.open, epoch, self._count)


class RepeatedReader(Reader):
    """Reads `count` epochs of a source in a row; None repeats forever.

    `epoch` is the epoch of the repeated dataset.
    """

    def __init__(self, open_epoch: Callable[[int], Reader], epoch: int, count: int | None) -> None:
        self._open = open_epoch
        self._first = epoch * (1 if count is None else count)
        self._count = count
        self._num_ended = 0
        self._reader = open_epoch(self._first)
        self._is_empty = True  # No batch of the current epoch was read yet.
        self.has_cheap_state = self._reader.has_cheap_state
        self.is_in_memory = self._reader.is_in_memory

    def read(self) -> Any:
        """Returns the next batch, from the next epoch if one has ended."""
        while self._count is None or self._num_ended < self._count:
            try:
                batch = next(self._reader)
            except StopIteration:
                if self._is_empty and self._count is None:
                    raise  # Otherwise an empty source would loop forever.
                self._go_to(self._num_ended + 1)
                continue
            self._is_empty = False
            return batch
        raise StopIteration

    def read_many(self, count: int, num_parts: int) -> tuple[Any, int] | None:
        """Returns batches of the current epoch; None at its end."""
        batches = self._reader.next_many(count, num_parts)
        if batches is not None:
            self._is_empty = False
        return batches

    def _go_to(self, num_ended: int) -> None:
        self._num_ended, self._is_empty = num_ended, True
        self._reader.close()
        if self._count is None or num_ended < self._count:
            self._reader = self._open(self._first + num_ended)

    def state(self) -> Any:
        """Returns the epoch and the position in it."""
        return {"num_ended": self._num_ended, "source": self._reader.state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Restores the epoch and the position in it."""
        self._go_to(state["num_ended"])
        if self._count is None or self._num_ended < self._count:
            self._reader.restore(state["source"])
            self._is_empty = False  # The state may be at the end of an epoch.

    def close(self) -> None:
        """Closes the reader of the current epoch."""
        self._reader.close()
