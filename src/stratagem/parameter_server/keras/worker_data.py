"""Assignment of worker-created batches for `fit`, `evaluate` and `predict`, on the coordinator.

If the number of batches is unknown, workers read some ahead and report back.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from stratagem.contexts import get_strategy
from stratagem.errors import CancelledError, explain, invalid
from stratagem.input.batches import HostBatch
from stratagem.input.distributed import DistributedDataset
from stratagem.input.sources.source import INFINITE_CARDINALITY
from stratagem.keras.training.datasets import DatasetCreator, UnreadData, part_of, require_end
from stratagem.parameter_server.coordinator.cluster_coordinator import ClusterCoordinator
from stratagem.parameter_server.coordinator.remote_value import RemoteValue
from stratagem.parameter_server.coordinator.worker import get_current_worker_index
from stratagem.strategies.strategy import Strategy

# Worker-side batches of a dataset that the worker created.


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


def _batches(
    creator: DatasetCreator, pipelines: Mapping[int, int], *, are_in_sync: bool
) -> WorkerBatches:
    """Returns the batches of the worker that calls it.

    `pipelines` maps workers to input pipelines. `are_in_sync` is True if the replicas of all
    workers form one step.
    """
    worker, count = pipelines[get_current_worker_index()], len(pipelines)
    dataset_fn = part_of(creator, worker, count, are_in_sync=are_in_sync)
    strategy, options = get_strategy(), creator.input_options
    return WorkerBatches(lambda: strategy.distribute_datasets_from_function(dataset_fn, options))


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


# Batches that a worker reads ahead, and the number left at which it reads more.
_NUM_AHEAD = 8
_FEW = 5
_WITHOUT_END = 2**62


class WorkerData(UnreadData):
    """Data created by workers, with batches assigned by number.

    `steps` is the number of batches to read, None for all. With `adds_up`, gradients are summed,
    and a step is a batch of each worker. `name` is the method's, for messages. Raises a ValueError
    if an epoch would never end.
    """

    def __init__(
        self,
        strategy: Strategy,
        creator: DatasetCreator,
        name: str,
        steps: object,
        *,
        adds_up: bool,
    ) -> None:
        self.coordinator = ClusterCoordinator(strategy)
        self.num_needed = strategy.placement.remote.variables.mode.num_needed if adds_up else 0
        workers = self.coordinator.present_workers
        pipelines = {worker: place for place, worker in enumerate(workers)}
        are_in_sync = strategy.placement.remote.is_synchronous
        self.source = self.coordinator.create_per_worker(
            functools.partial(_batches, creator, pipelines, are_in_sync=are_in_sync)
        )
        asked = {worker: self.ask(worker, WorkerBatches.cardinality) for worker in workers}
        self.lengths = {worker: answer_of(self.coordinator, asked[worker]) for worker in workers}
        require_end(
            min(self.lengths.values(), key=lambda one: one != INFINITE_CARDINALITY), name, steps
        )
        self._num_opened = 0
        self._latest: BatchAssigner | None = None

    def ask(self, worker: int, method: Callable[..., Any], *args: object) -> RemoteValue:
        """Makes a worker call a method of its `WorkerBatches`; returns the future result."""
        return self.coordinator.schedule(method, args=(self.source, *args), worker=worker)

    def opening_of(self, reader: BatchAssigner) -> int:
        """Returns the number of passes over the data before a reader that starts now.

        Keras creates more readers than it uses, and reads one batch to build a model.
        """
        if self._latest is not None and self._latest.counts:
            self._num_opened += 1
        self._latest = reader
        return self._num_opened

    @property
    def num_batches(self) -> int | None:
        """Steps per epoch; None if unknown or infinite."""
        lengths = self.lengths.values()
        if min(lengths) < 0:
            return None
        return max(lengths) if self.num_needed else sum(lengths)

    def batches(self) -> BatchAssigner:
        """Returns an iterator, opened on first use."""
        return BatchAssigner(self)


@dataclasses.dataclass
class _Worker:
    """State of a worker's batches."""

    known: int
    has_ended: bool
    num_assigned: int = 0
    asked: tuple[int, RemoteValue] | None = None


class BatchAssigner(Iterator[Any]):
    """Assigns the batches of an epoch, or of all epochs of a number of steps.

    `counts` is True if it has read more than Keras needs to build a model.
    """

    def __init__(self, data: WorkerData) -> None:
        self._data = data
        self._opening = -1
        self._workers: dict[int, _Worker] = {}
        self._num_peeked = 0
        self.counts = False

    @property
    def source(self) -> Any:
        """The worker's batches, as an argument of a scheduled function."""
        return self._data.source

    def __next__(self) -> Any:
        """Returns the next batch itself, for callers without support for assignments."""
        self._open()
        self._num_peeked += 1
        self.counts = self._num_peeked > 1
        worker = self._next_worker(lambda _: 0)
        if worker is None:
            raise StopIteration
        assignment = BatchAssignment(worker, self._opening, self._workers[worker].num_assigned, 1)
        self._assign(worker)
        return answer_of(
            self._data.coordinator, self._data.ask(worker, WorkerBatches.peek, assignment)
        )

    def take(self, num_steps: int, load: Callable[[int], int]) -> list[BatchAssignment]:
        """Returns assignments for the next `num_steps` steps, or fewer at the end.

        `load` returns a worker's number of outstanding groups; the least busy worker comes first.
        Raises StopIteration at the end, and a ValueError if others wait for a worker without any
        batch.
        """
        self._open()
        self.counts = True
        firsts = {index: worker.num_assigned for index, worker in self._workers.items()}
        weights: dict[int, list[float]] = {index: [] for index in self._workers}
        for _ in range(num_steps):
            if not (self._step_of_all(weights) if self._data.num_needed else self._step(load)):
                break
        assignments = [
            BatchAssignment(
                index,
                self._opening,
                firsts[index],
                worker.num_assigned - firsts[index],
                tuple(weights[index]) or None,
            )
            for index, worker in self._workers.items()
            if weights[index] or worker.num_assigned > firsts[index]
        ]
        if not assignments:
            raise StopIteration
        return assignments

    def _open(self) -> None:
        if self._opening >= 0:
            return
        self._opening = self._data.opening_of(self)
        for index, length in self._data.lengths.items():
            is_known = length >= 0
            known = length if is_known else 0
            if length == INFINITE_CARDINALITY:
                is_known, known = True, _WITHOUT_END
            self._workers[index] = _Worker(known, is_known)
        for index in self._workers:
            self._look_ahead(index)

    def _step(self, load: Callable[[int], int]) -> bool:
        worker = self._next_worker(load)
        if worker is not None:
            self._assign(worker)
        return worker is not None

    def _step_of_all(self, weights: dict[int, list[float]]) -> bool:
        """Assigns a batch of each worker; returns False if none has a batch left.

        A worker without a batch repeats its last one with weight 0.
        """
        having = [index for index in self._workers if self._has_more(index)]
        for index in self._workers if having else ():
            if index in having:
                weights[index].append(1 / min(len(having), self._data.num_needed))
                self._assign(index)
                continue
            if not self._workers[index].num_assigned:
                raise invalid(
                    f"The dataset of worker {index} is empty, but the other workers wait for "
                    "its gradients.",
                    expected="at least one batch per worker.",
                    fix="split the data into smaller shards, or use fewer workers.",
                    code="SG308",
                )
            weights[index].append(0.0)
        return bool(having)

    def _next_worker(self, load: Callable[[int], int]) -> int | None:
        def order(index: int) -> tuple[int, int, int]:
            return load(index), self._workers[index].num_assigned, index

        return next(filter(self._has_more, sorted(self._workers, key=order)), None)

    def _has_more(self, index: int) -> bool:
        worker = self._workers[index]
        while worker.num_assigned >= worker.known and not worker.has_ended:
            self._look_ahead(index)
            assert worker.asked is not None
            upto, answer = worker.asked
            worker.known, worker.asked = answer_of(self._data.coordinator, answer), None
            worker.has_ended = worker.known < upto
        return worker.num_assigned < worker.known

    def _assign(self, index: int) -> None:
        self._workers[index].num_assigned += 1
        self._look_ahead(index)

    def _look_ahead(self, index: int) -> None:
        """Asks a worker for its number of batches, before they are assigned."""
        worker = self._workers[index]
        few = worker.known - worker.num_assigned < _FEW
        if few and not worker.has_ended and worker.asked is None:
            upto = worker.num_assigned + _NUM_AHEAD
            asked = self._data.ask(index, WorkerBatches.look, self._opening, upto)
            worker.asked = upto, asked


def answer_of(coordinator: ClusterCoordinator, asked: RemoteValue) -> Any:
    """Returns a worker's answer; raises the error that prevented it."""
    try:
        return asked.fetch()
    except CancelledError:
        coordinator.join()  # raises the reason
        raise
