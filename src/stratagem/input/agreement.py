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

__all__ = ["Agreement", "Reading"]

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

    def reading(self, read: Callable[[Reader], HostBatch]) -> Reading:
        """Begins to read the dataset once more.

        Args:
            read: reads the next batch of this process.

        Returns:
            What reads the next batch and agrees on it with the others.
        """
        self._num_readings += 1
        return Reading(f"{self._name} ({self._num_readings})", self._num_local_replicas, read)


class Reading:
    """One time through a dataset.

    Args:
        name: of this time, the same on all processes.
        num_local_replicas: replicas of this process.
        read: reads the next batch of this process.
    """

    def __init__(
        self, name: str, num_local_replicas: int, read: Callable[[Reader], HostBatch]
    ) -> None:
        group = current_group()
        assert group is not None
        self._name = name
        self._label = group.identity.label
        self._stream = group.stream(name)
        self._count = num_local_replicas
        self._read = read
        self._pattern: HostBatch | None = None  # what an empty batch looks like
        self._has_ended = False

    def next(self, reader: Reader) -> HostBatch:
        """Returns the next batch, with the lengths of all replicas.

        Args:
            reader: of the source of this process.

        Raises:
            StopIteration: the data of all has ended, or the reading was given up.
            RuntimeError: another process has given it up.
            InvalidArgumentError: this process has no data at all.
        """
        batch = None
        if not self._has_ended:
            try:
                batch = self._read(reader)
            except StopIteration:
                self._has_ended = True
        own = None if batch is None else (batch.size, batch.lengths)
        # A thread that reads ahead says nothing of where the program is.
        is_main = threading.current_thread() is threading.main_thread()
        with waiting_for_input(self._name) if is_main else contextlib.nullcontext():
            told = self._stream.exchange(own)
        if told is None or all(theirs is None for theirs in told):
            raise StopIteration
        size = max(theirs[0] for theirs in told if theirs is not None)
        lengths: list[int] = []
        for theirs in told:
            none = (0,) * self._count
            lengths += none if theirs is None else theirs[1] or (theirs[0],) * self._count
        self._pattern = batch or self._pattern
        if self._pattern is None:
            raise self._nothing()
        parts: list[Any] = [None] * self._count if batch is None else batch.parts(self._count)
        if batch is None:
            parts[0] = self._pattern.rows(0, 0)
        return join_parts(parts, size=size, all_lengths=tuple(lengths))

    def give_up(self) -> None:
        """Ends the reading: whoever waits in `next` hears that there is nothing more.

        May be called again, and from any thread.
        """
        self._stream.close()

    def _nothing(self) -> InvalidArgumentError:
        return InvalidArgumentError(
            explain(
                f"{self._label} has no data at all in {self._name}, and others have.",
                expected="at least one batch on each worker: what an empty one looks like is not "
                "known else.",
                fix="give each worker some of the data, or choose AutoShardPolicy.DATA.",
            )
        )
