"""Assignment of worker-created batches for `fit`, `evaluate` and `predict`, on the coordinator.

If the number of batches is unknown, workers read some ahead and report back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from stratagem.errors import CancelledError
from stratagem.input.sources.source import INFINITE_CARDINALITY
from stratagem.keras.training.dataset_creator import DatasetCreator, require_end
from stratagem.keras.training.unread_data import UnreadData
from stratagem.messages import explain
from stratagem.parameter_server.coordinator.cluster_coordinator import ClusterCoordinator
from stratagem.parameter_server.coordinator.remote_value import RemoteValue
from stratagem.parameter_server.keras.worker_batches import (
    BatchAssignment,
    BatchesMaker,
    WorkerBatches,
)

if TYPE_CHECKING:
    from stratagem.strategies.base.strategy import Strategy


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
        maker = BatchesMaker(
            creator, pipelines, are_in_sync=strategy.placement.remote.is_synchronous
        )
        self.source = self.coordinator.create_per_worker(maker)
        asked = {worker: self.ask(worker, WorkerBatches.cardinality) for worker in workers}
        self.lengths = {worker: answer_of(self.coordinator, asked[worker]) for worker in workers}
        require_end(min(self.lengths.values(), key=_endless_first), name, steps)
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
                raise ValueError(
                    explain(
                        f"The dataset of worker {index} is empty, but the other workers wait for "
                        "its gradients.",
                        expected="at least one batch per worker.",
                        fix="split the data into smaller shards, or use fewer workers.",
                        code="SG308",
                    )
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


def _endless_first(length: int) -> int:
    return 0 if length == INFINITE_CARDINALITY else 1
