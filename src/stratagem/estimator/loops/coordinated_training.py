"""Training that a coordinator schedules on the workers of a cluster with parameter servers."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from stratagem import summary
from stratagem.context import get_strategy
from stratagem.coordinator import ClusterCoordinator, RemoteValue
from stratagem.estimator.loops.batches import InputFunction, features_and_labels, require_batch
from stratagem.estimator.loops.training_part import TrainingPart
from stratagem.estimator.steps.model_step import ModelStep
from stratagem.input.batches import place
from stratagem.keras.dataset_creator import DatasetCreator
from stratagem.keras.served_fit import settle
from stratagem.keras.worker_batches import Ticket
from stratagem.keras.worker_data import WorkerData

__all__ = ["Coordinated", "WorkersBatches"]

_IN_FLIGHT_PER_WORKER = 3


class WorkersBatches:
    """What an input function gives on each worker, which reads its own part.

    Iterating gives tickets for the batches of a step.

    Args:
        input_fn: the input function, with its arguments.
        strategy: of the coordinator.
    """

    def __init__(self, input_fn: InputFunction, strategy: Any) -> None:
        adds_up = strategy.placement.remote.variables.mode.num_needed > 0
        # Hooks and steps end a training, and it may read data without end: one batch is enough.
        self._data = WorkerData(
            strategy, DatasetCreator(input_fn), "Estimator.train", 1, adds_up=adds_up
        )
        self._tickets = self._data.get_jax_iterator()

    @property
    def source(self) -> Any:
        """What stands in a scheduled function for a worker's batches."""
        return self._tickets.source

    def first(self) -> tuple[Any, Any]:
        """Returns the first batch, from which the shapes of everything follow.

        Raises:
            ValueError: there is none.
        """
        return features_and_labels(require_batch(next(self._data.get_jax_iterator(), None)))

    def after(self, first: Any) -> Iterator[list[Ticket]]:
        """Yields what each step is of: all batches, since the first one is there still.

        Args:
            first: what `first` has returned.
        """
        del first
        while True:
            try:
                tickets = self._tickets.take(1, lambda worker: 0)
            except StopIteration:
                return
            yield tickets

    def close(self) -> None:
        """Nothing: what workers have read ends with the strategy."""


class _StepOnWorker:
    """Runs a training step, on the worker that it is sent to.

    Args:
        step: the step.
    """

    def __init__(self, step: ModelStep) -> None:
        self._step = step

    def __call__(self, batches: Any, ticket: Ticket) -> Any:
        """Returns what hooks may fetch, as NumPy values.

        Args:
            batches: this worker's.
            ticket: which of them, one as a rule.
        """
        strategy: Any = get_strategy()
        values: Any = None
        taken = batches.take(ticket)
        for batch, weight in zip(taken, ticket.weights or [1.0] * len(taken), strict=True):
            strategy.placement.remote.gradient_weight = weight
            try:
                data = features_and_labels(place([batch], strategy.topology).value())
                values = strategy.run(self._step.step, args=data)
            finally:
                strategy.placement.remote.gradient_weight = 1.0
        return jax.tree.map(lambda value: np.asarray(strategy.local_results(value)[0]), values)


class Coordinated(TrainingPart):
    """The part of a coordinator: workers run the steps, a few of which are under way for each.

    Hooks see the values of the newest step that has ended.

    Args:
        strategy: of the training.
    """

    counts_all = True

    def __init__(self, strategy: Any) -> None:
        super().__init__(strategy)
        self._strategy = strategy
        self._function: _StepOnWorker | None = None
        self._source: Any = None
        self._under_way: collections.deque[list[RemoteValue]] = collections.deque()
        self._values: Any = None

    @property
    def num_workers(self) -> int:
        """How many train."""
        return self._coordinator.num_workers

    @property
    def _coordinator(self) -> ClusterCoordinator:
        return ClusterCoordinator(self._strategy)

    def batches(self, input_fn: InputFunction) -> WorkersBatches:
        """Returns the batches that workers read.

        Args:
            input_fn: the input function, with its arguments.
        """
        made = WorkersBatches(input_fn, self._strategy)
        self._source = made.source
        self._under_way.clear()
        self._function = self._values = None
        return made

    def run(self, step: ModelStep, batch: list[Ticket]) -> Any:
        """Schedules a step, and returns the values of the newest one that has ended."""
        if self._function is None:
            self._function = _StepOnWorker(step)
        self._under_way.append(
            [
                self._coordinator.schedule(
                    self._function, args=(self._source, ticket), worker=ticket.worker
                )
                for ticket in batch
            ]
        )
        most = _IN_FLIGHT_PER_WORKER * self.num_workers
        while self._values is None or len(self._under_way) > most:
            self._values = self._newest()
        summary.scalar("loss", self._values["loss"])  # workers have no writer
        return self._values

    def finish(self) -> Any:
        """Waits for all steps, and returns the values of the last one."""
        settle(self._coordinator)
        while self._under_way:
            self._values = self._newest()
        return self._values

    def _newest(self) -> Any:
        return [value.fetch() for value in self._under_way.popleft()][-1]
