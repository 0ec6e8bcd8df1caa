"""Data of `fit`, `evaluate` and `predict` that workers make: the coordinator's side.

It deals out tickets, which stand for batches of one worker. Where nobody knows how many there are,
workers read some ahead and tell.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from stratagem.coordinator import ClusterCoordinator, RemoteValue
from stratagem.errors import CancelledError
from stratagem.input.sources import INFINITE_CARDINALITY
from stratagem.keras.dataset_creator import DatasetCreator, require_end
from stratagem.keras.unread_data import UnreadData
from stratagem.keras.worker_batches import BatchesMaker, Ticket, WorkerBatches
from stratagem.messages import explain

__all__ = ["WorkerData", "WorkerTickets", "answer_of"]

# How many batches a worker reads ahead, and at how few of them it is asked again.
_NUM_AHEAD = 8
_FEW = 5
_WITHOUT_END = 2**62


class WorkerData(UnreadData):
    """Hands tickets to who runs the steps, and batches to Keras.

    Args:
        strategy: the coordinator's.
        creator: makes the dataset of each worker.
        name: of the method, for messages.
        steps: how many batches are read of it; None for all.
        adds_up: whether the workers' gradients are added up: then a step is a batch of each.

    Raises:
        TypeError: no dataset was made. ValueError: an epoch would never end, or a worker has no
            batch.
    """

    def __init__(
        self, strategy: Any, creator: DatasetCreator, name: str, steps: Any, *, adds_up: bool
    ) -> None:
        self.coordinator = ClusterCoordinator(strategy)
        self.num_needed = strategy.placement.remote.variables.mode.num_needed if adds_up else 0
        workers = self.coordinator.present_workers
        pipelines = {worker: place for place, worker in enumerate(workers)}
        maker = BatchesMaker(
            creator, pipelines, are_in_sync=strategy.placement.remote.variables.mode.num_needed > 0
        )
        self.source = self.coordinator.create_per_worker(maker)
        asked = {worker: self.ask(worker, WorkerBatches.cardinality) for worker in workers}
        self.lengths = {worker: answer_of(self.coordinator, asked[worker]) for worker in workers}
        require_end(min(self.lengths.values(), key=_endless_first), name, steps)
        self._num_opened = 0
        self._latest: WorkerTickets | None = None

    def ask(self, worker: int, method: Callable[..., Any], *args: Any) -> RemoteValue:
        """Has a worker call a method of its batches.

        Args:
            worker: its index.
            method: of `WorkerBatches`.
            args: of the method.
        """
        return self.coordinator.schedule(method, args=(self.source, *args), worker=worker)

    def opening_of(self, reader: WorkerTickets) -> int:
        """Returns how many times the data was read before a reader.

        Keras makes more readers than it uses, and reads one batch to build a model.

        Args:
            reader: which begins now.
        """
        if self._latest is not None and self._latest.counts:
            self._num_opened += 1
        self._latest = reader
        return self._num_opened

    @property
    def num_batches(self) -> int | None:
        """Steps of an epoch; None where that is unknown, or without end."""
        lengths = self.lengths.values()
        if min(lengths) < 0:
            return None
        return max(lengths) if self.num_needed else sum(lengths)

    def get_jax_iterator(self) -> WorkerTickets:
        """Returns an iterator; nothing is opened before something is asked for."""
        return WorkerTickets(self)


@dataclasses.dataclass
class _Worker:
    """What is known of the batches of a worker."""

    known: int
    has_ended: bool
    num_dealt: int = 0
    asked: tuple[int, RemoteValue] | None = None


class WorkerTickets(Iterator[Any]):
    """Deals out the batches of an epoch, or of all epochs of a number of steps.

    Args:
        data: which made it.

    `counts` tells whether it has read more than to build a model.
    """

    def __init__(self, data: WorkerData) -> None:
        self._data = data
        self._opening = -1
        self._workers: dict[int, _Worker] = {}
        self._num_peeked = 0
        self.counts = False

    @property
    def source(self) -> Any:
        """What stands in a scheduled function for the worker's batches."""
        return self._data.source

    def __next__(self) -> Any:
        """The next batch itself, for who knows nothing of tickets."""
        self._open()
        self._num_peeked += 1
        self.counts = self._num_peeked > 1
        worker = self._next_worker(lambda _: 0)
        if worker is None:
            raise StopIteration
        ticket = Ticket(worker, self._opening, self._workers[worker].num_dealt, 1)
        self._deal(worker)
        return answer_of(self._data.coordinator, self._data.ask(worker, WorkerBatches.peek, ticket))

    def take(self, num_steps: int, load: Callable[[int], int]) -> list[Ticket]:
        """Returns tickets for the next steps.

        Args:
            num_steps: how many, fewer at the end.
            load: returns how much a worker has to do; who has least is first.

        Raises:
            StopIteration: there are none any more.
            ValueError: a worker has no batch at all, and others wait for its gradients.
        """
        self._open()
        self.counts = True
        firsts = {index: worker.num_dealt for index, worker in self._workers.items()}
        weights: dict[int, list[float]] = {index: [] for index in self._workers}
        for _ in range(num_steps):
            if not (self._step_of_all(weights) if self._data.num_needed else self._step(load)):
                break
        tickets = [
            Ticket(
                index,
                self._opening,
                firsts[index],
                worker.num_dealt - firsts[index],
                tuple(weights[index]) or None,
            )
            for index, worker in self._workers.items()
            if weights[index] or worker.num_dealt > firsts[index]
        ]
        if not tickets:
            raise StopIteration
        return tickets

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
            self._deal(worker)
        return worker is not None

    def _step_of_all(self, weights: dict[int, list[float]]) -> bool:
        """A batch of each worker; of those that have none any more one that counts nothing."""
        having = [index for index in self._workers if self._has_more(index)]
        for index in self._workers if having else ():
            if index in having:
                weights[index].append(1 / min(len(having), self._data.num_needed))
                self._deal(index)
                continue
            if not self._workers[index].num_dealt:
                raise ValueError(
                    explain(
                        f"The dataset of worker {index} has no batch, and the others wait for its "
                        "gradients.",
                        expected="a batch of each worker at least.",
                        fix="share the data out in smaller parts, or use fewer workers.",
                    )
                )
            weights[index].append(0.0)
        return bool(having)

    def _next_worker(self, load: Callable[[int], int]) -> int | None:
        def order(index: int) -> tuple[int, int, int]:
            return load(index), self._workers[index].num_dealt, index

        return next(filter(self._has_more, sorted(self._workers, key=order)), None)

    def _has_more(self, index: int) -> bool:
        worker = self._workers[index]
        while worker.num_dealt >= worker.known and not worker.has_ended:
            self._look_ahead(index)
            assert worker.asked is not None
            upto, answer = worker.asked
            worker.known, worker.asked = answer_of(self._data.coordinator, answer), None
            worker.has_ended = worker.known < upto
        return worker.num_dealt < worker.known

    def _deal(self, index: int) -> None:
        self._workers[index].num_dealt += 1
        self._look_ahead(index)

    def _look_ahead(self, index: int) -> None:
        """Asks how many batches there are, in time before they are dealt out."""
        worker = self._workers[index]
        few = worker.known - worker.num_dealt < _FEW
        if few and not worker.has_ended and worker.asked is None:
            upto = worker.num_dealt + _NUM_AHEAD
            asked = self._data.ask(index, WorkerBatches.look, self._opening, upto)
            worker.asked = upto, asked


def answer_of(coordinator: ClusterCoordinator, asked: RemoteValue) -> Any:
    """Returns what a worker has answered; raises the error that kept it from that."""
    try:
        return asked.fetch()
    except CancelledError:
        coordinator.join()  # which raises why
        raise


def _endless_first(length: int) -> int:
    return 0 if length == INFINITE_CARDINALITY else 1
