"""Sliding window of batches that several trainers share, each at a pace of its own."""

from __future__ import annotations

import collections
import dataclasses

from stratagem.input.service.held_splits import HeldSplit, PackedBatch
from stratagem.messages import explain


@dataclasses.dataclass(frozen=True)
class CrossTrainerCache:
    """Lets the trainers of a job share its batches: each gets them all, and they are read once.

    Workers keep the last batches in a window. A trainer that joins late or falls behind continues
    at the oldest batch of the window.

    Args:
        trainer_id: name of the trainer. Consumers with the same name divide the batches.

    Raises:
        ValueError: the name is empty.

    Example:
        >>> sg.input.service.CrossTrainerCache("learning rate 0.1").trainer_id
        'learning rate 0.1'

    Source: TF 2.21 data_service_ops.py, CrossTrainerCache.
    """

    trainer_id: str

    def __post_init__(self) -> None:
        if not self.trainer_id:
            raise ValueError(
                explain(
                    f"CrossTrainerCache received trainer_id={self.trainer_id!r}.",
                    expected="a name, another one for each trainer.",
                    fix='pass CrossTrainerCache("trainer 0"), and so on.',
                )
            )


class SharedWindow:
    """Batches of one worker in the order of reading. Not thread-safe.

    The oldest batches that any trainer has had are dropped when the window is full. Batches that no
    trainer has had are never dropped: reading stops instead, when they fill half of the window.

    Args:
        most_bytes: size of all batches. One batch ahead of all trainers is always kept.
        most_ahead: number of batches that no trainer has had yet.
    """

    def __init__(self, most_bytes: int, most_ahead: int) -> None:
        self._most_bytes = most_bytes
        self._most_ahead = most_ahead
        # Batches from number `_first` on; None for those of splits that were lost.
        self._batches: collections.deque[PackedBatch | None] = collections.deque()
        self._first = 0
        self._front = 0  # the lowest number that no trainer has had
        self._num_bytes = self._num_bytes_ahead = 0
        self._next: dict[str, int] = {}  # by trainer

    @property
    def num_bytes(self) -> int:
        """Size of all batches in bytes."""
        return self._num_bytes

    @property
    def has_room(self) -> bool:
        """True if one more batch may be read."""
        num_ahead = self._first + len(self._batches) - self._front
        return num_ahead == 0 or (
            num_ahead < self._most_ahead and self._num_bytes_ahead < self._most_bytes // 2
        )

    def add(self, batch: PackedBatch) -> None:
        """Adds a batch, and drops the oldest if there are too many."""
        self._batches.append(batch)
        self._num_bytes += batch.num_bytes
        self._num_bytes_ahead += batch.num_bytes
        while self._num_bytes > self._most_bytes and self._first < self._front:
            dropped = self._batches.popleft()
            self._first += 1
            self._num_bytes -= _size(dropped)

    def next(self, trainer: str) -> PackedBatch | None:
        """Returns the next batch for a trainer, None if there is none yet."""
        number = max(self._next.get(trainer, 0), self._first)
        end = self._first + len(self._batches)
        while number < end:
            batch = self._batches[number - self._first]
            number += 1
            if number > self._front:
                self._front = number
                self._num_bytes_ahead -= _size(batch)
            if batch is not None:
                self._next[trainer] = number
                return batch
        self._next[trainer] = number
        return None

    def remove(self, held: HeldSplit) -> None:
        """Removes the batches of a split that another worker reads from now on."""
        for place, batch in enumerate(self._batches):
            if batch is not None and batch.held is held:
                self._batches[place] = None
                self._num_bytes -= batch.num_bytes
                if self._first + place >= self._front:
                    self._num_bytes_ahead -= batch.num_bytes


def _size(batch: PackedBatch | None) -> int:
    return 0 if batch is None else batch.num_bytes
