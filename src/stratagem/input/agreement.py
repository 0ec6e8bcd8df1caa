"""How much each process has read, where each of them reads something else.

The sizes of the parts are part of the program that all run, so that each has to know those of all.
A process whose data has ended goes on with empty parts until all have ended.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable
from typing import Any

from stratagem.errors import InvalidArgumentError
from stratagem.group import current_group
from stratagem.input.batches import HostBatch, join_parts
from stratagem.input.sources import Reader
from stratagem.messages import explain
from stratagem.topology.lockstep import waiting_for_input

__all__ = ["Agreement"]

_numbers = itertools.count()  # all processes make their datasets in the same order


class Agreement:
    """What the processes tell each other about one distributed dataset.

    Args:
        num_local_replicas: replicas of this process.
    """

    def __init__(self, num_local_replicas: int) -> None:
        self._name = f"dataset {next(_numbers)}"
        self._num_local_replicas = num_local_replicas
        self._num_readings = 0
        self._cardinalities: dict[int, int] = {}

    def cardinality(self, own: int) -> int:
        """Returns the steps of an epoch of all: as many as the process with the most data has.

        Args:
            own: those of this process; negative where they are not known.
        """
        if own not in self._cardinalities:
            group = current_group()
            assert group is not None
            counts = group.exchange(f"the length of {self._name}", own)
            self._cardinalities[own] = min(counts) if min(counts) < 0 else max(counts)
        return self._cardinalities[own]

    def reading(self, read: Callable[[Reader], HostBatch]) -> Callable[[Reader], HostBatch]:
        """Returns a function that reads the next batch and agrees on it with the others.

        Args:
            read: reads the next batch of this process.
        """
        self._num_readings += 1
        reading = _Reading(f"{self._name} ({self._num_readings})", self._num_local_replicas, read)
        return reading.next


class _Reading:
    """One time through a dataset."""

    def __init__(
        self, stream: str, num_local_replicas: int, read: Callable[[Reader], HostBatch]
    ) -> None:
        self._stream = stream
        self._count = num_local_replicas
        self._read = read
        self._pattern: HostBatch | None = None  # what an empty batch looks like
        self._has_ended = False

    def next(self, reader: Reader) -> HostBatch:
        batch = None
        if not self._has_ended:
            try:
                batch = self._read(reader)
            except StopIteration:
                self._has_ended = True
        group = current_group()
        assert group is not None
        own = None if batch is None else (batch.size, batch.lengths)
        # A thread that reads ahead says nothing of where the program is.
        is_main = threading.current_thread() is threading.main_thread()
        with waiting_for_input(self._stream) if is_main else contextlib.nullcontext():
            told = group.exchange_beside(self._stream, own)
        if all(theirs is None for theirs in told):
            raise StopIteration
        size = max(theirs[0] for theirs in told if theirs is not None)
        lengths: list[int] = []
        for theirs in told:
            none = (0,) * self._count
            lengths += none if theirs is None else theirs[1] or (theirs[0],) * self._count
        self._pattern = batch or self._pattern
        if self._pattern is None:
            raise self._nothing(group.identity.label)
        parts: list[Any] = [None] * self._count if batch is None else batch.parts(self._count)
        if batch is None:
            parts[0] = self._pattern.rows(0, 0)
        return join_parts(parts, size=size, all_lengths=tuple(lengths))

    def _nothing(self, label: str) -> InvalidArgumentError:
        return InvalidArgumentError(
            explain(
                f"{label} has no data at all in {self._stream}, and others have.",
                expected="at least one batch on each worker: what an empty one looks like is not "
                "known else.",
                fix="give each worker some of the data, or choose AutoShardPolicy.DATA.",
            )
        )
