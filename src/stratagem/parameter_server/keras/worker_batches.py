"""Worker-side batches of a dataset that the worker created."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from stratagem.contexts import get_strategy
from stratagem.input.batches import HostBatch
from stratagem.input.distributed import DistributedDataset
from stratagem.keras.training.dataset_creator import DatasetCreator, part_of
from stratagem.messages import explain
from stratagem.parameter_server.coordinator.worker import get_current_worker_index


@dataclasses.dataclass(frozen=True)
class BatchAssignment:
    """Batches for a worker: `count` from number `first` in its own dataset.

    `opening` is the number of earlier passes over the dataset. `weights` are the gradient weights
    of the batches if workers' gradients are summed; those beyond `count` repeat the last batch with
    weight 0.
    """

    worker: int
    opening: int
    first: int
    count: int
    weights: tuple[float, ...] | None = None


class BatchesMaker:
    """Function sent to a worker to create its batches.

    `pipelines` maps workers to input pipelines. `are_in_sync` is True if the replicas of all
    workers form one step.
    """

    def __init__(
        self, creator: DatasetCreator, pipelines: Mapping[int, int], *, are_in_sync: bool
    ) -> None:
        self._creator = creator
        self._pipelines = dict(pipelines)
        self._are_in_sync = are_in_sync

    def __call__(self) -> WorkerBatches:
        """Returns the batches."""
        worker, count = self._pipelines[get_current_worker_index()], len(self._pipelines)
        dataset_fn = part_of(self._creator, worker, count, are_in_sync=self._are_in_sync)
        strategy, options = get_strategy(), self._creator.input_options
        return WorkerBatches(
            lambda: strategy.distribute_datasets_from_function(dataset_fn, options)
        )


class WorkerBatches:
    """Batches by number, so that a rerun function gets the same ones.

    `make` creates the dataset on first use, so that its errors are raised in a scheduled function.
    """

    def __init__(self, make: Callable[[], DistributedDataset]) -> None:
        self._make = make
        self._made: DistributedDataset | None = None
        self._source: Iterator[HostBatch] = iter(())
        self._opening = -1
        self._position = 0  # of the first batch ahead
        self._ahead: collections.deque[HostBatch] = collections.deque()
        self._last: HostBatch | None = None

    @property
    def _dataset(self) -> DistributedDataset:
        if self._made is None:
            self._made = self._make()
        return self._made

    def cardinality(self) -> int:
        """Returns the number of batches; negative if unknown or infinite."""
        return self._dataset.cardinality

    def look(self, opening: int, upto: int) -> int:
        """Reads ahead up to `upto` batches of a pass, and returns how many of these exist.

        `opening` is the number of earlier passes over the dataset.
        """
        if opening != self._opening:
            self._go_to(opening, 0)
        self._read(upto - self._position)
        return min(upto, self._position + len(self._ahead))

    def peek(self, assignment: BatchAssignment) -> Any:
        """Returns a batch as a pytree of arrays, without taking it."""
        self._go_to(assignment.opening, assignment.first)
        self._read(1)
        return self._ahead[0].whole()

    def take(self, assignment: BatchAssignment) -> list[HostBatch]:
        """Returns the assigned batches; raises a RuntimeError if there are fewer than before."""
        self._go_to(assignment.opening, assignment.first)
        self._read(assignment.count)
        if len(self._ahead) < assignment.count:
            raise RuntimeError(
                explain(
                    f"The dataset of worker {assignment.worker} ended after "
                    f"{self._position + len(self._ahead)} batches, but had at least "
                    f"{assignment.first + assignment.count} before.",
                    expected="a dataset_fn that creates the same dataset at each call.",
                    fix="remove dependencies of dataset_fn on state that changes between calls.",
                    code="SG605",
                )
            )
        taken = [self._ahead.popleft() for _ in range(assignment.count)]
        self._position += assignment.count
        if taken:
            self._last = taken[-1]
        num_again = len(assignment.weights or ()) - assignment.count
        if num_again <= 0:
            return taken
        return taken + [self._last_before(assignment)] * num_again

    def _last_before(self, assignment: BatchAssignment) -> HostBatch:
        if self._last is None:  # This process restarted after the data had ended.
            self._go_to(assignment.opening, max(0, assignment.first - 1))
            self._read(1)
            self._last = self._ahead[0]
        return self._last

    def _go_to(self, opening: int, first: int) -> None:
        if opening != self._opening or first < self._position:
            self._source = self._dataset.make_loader(opening, None).host_batches(first)
            self._opening, self._position = opening, first
            self._ahead.clear()
        self._read(first - self._position)
        while self._position < first and self._ahead:
            self._ahead.popleft()
            self._position += 1

    def _read(self, count: int) -> None:
        """Reads until `count` batches are ahead, or the data ends."""
        while len(self._ahead) < count:
            batch = next(self._source, None)
            if batch is None:
                return
            self._ahead.append(batch)
