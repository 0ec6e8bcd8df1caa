"""Training that a coordinator schedules on the workers of a parameter-server cluster."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from stratagem.contexts import get_strategy
from stratagem.estimator.loops.batches import InputFunction, features_and_labels, require_batch
from stratagem.estimator.loops.training_role import TrainingRole
from stratagem.estimator.steps.model_step import ModelStep
from stratagem.execution import summary
from stratagem.input.placement import place
from stratagem.keras.training.dataset_creator import DatasetCreator
from stratagem.parameter_server.coordinator.cluster_coordinator import ClusterCoordinator
from stratagem.parameter_server.coordinator.remote_value import RemoteValue
from stratagem.parameter_server.keras.worker_batches import BatchAssignment
from stratagem.parameter_server.keras.worker_data import WorkerData

if TYPE_CHECKING:
    from stratagem.parameter_server.keras.worker_batches import WorkerBatches


_IN_FLIGHT_PER_WORKER = 3


class ScheduledBatches:
    """Batches that each worker reads itself; iterating yields the assignments of a step."""

    def __init__(self, input_fn: InputFunction, strategy: Any) -> None:
        adds_up = strategy.placement.remote.is_synchronous
        # Data may be endless, and hooks or step limits end training: take one batch at a time.
        self._data = WorkerData(
            strategy, DatasetCreator(input_fn), "Estimator.train", 1, adds_up=adds_up
        )
        self._assigner = self._data.batches()

    @property
    def source(self) -> Any:
        """Placeholder for a worker's batches in a scheduled function."""
        return self._assigner.source

    def first(self) -> tuple[Any, Any]:
        """Returns the first batch, which determines all shapes."""
        return features_and_labels(require_batch(next(self._data.batches(), None)))

    def after(self, first: object) -> Iterator[list[BatchAssignment]]:
        """Yields the assignments of each step; reading the first batch consumed nothing."""
        del first
        while True:
            try:
                assignments = self._assigner.take(1, lambda worker: 0)
            except StopIteration:
                return
            yield assignments

    def close(self) -> None:
        """Does nothing: workers keep their data until the strategy is closed."""


@dataclasses.dataclass(frozen=True, eq=False)
class _WorkerStep:
    """Runs a training step on the worker it is sent to."""

    step: ModelStep

    def __call__(self, batches: WorkerBatches, assignment: BatchAssignment) -> Any:
        """Returns values for hooks as NumPy arrays."""
        strategy: Any = get_strategy()
        values: Any = None
        taken = batches.take(assignment)
        for batch, weight in zip(taken, assignment.weights or [1.0] * len(taken), strict=True):
            strategy.placement.remote.gradient_weight = weight
            try:
                data = features_and_labels(place([batch], strategy.topology).value())
                values = strategy.run(self.step.step, args=data)
            finally:
                strategy.placement.remote.gradient_weight = 1.0
        return jax.tree.map(lambda value: np.asarray(strategy.local_results(value)[0]), values)


class CoordinatorRole(TrainingRole):
    """Role of a coordinator: workers run steps; hooks see the newest finished one."""

    counts_all = True

    def __init__(self, strategy: Any) -> None:
        super().__init__(strategy)
        self._strategy = strategy
        self._function: _WorkerStep | None = None
        self._source: Any = None
        self._in_flight: collections.deque[list[RemoteValue]] = collections.deque()
        self._values: Any = None

    @property
    def num_workers(self) -> int:
        """Number of workers that train."""
        return self._coordinator.num_workers

    @property
    def _coordinator(self) -> ClusterCoordinator:
        return ClusterCoordinator(self._strategy)

    def batches(self, input_fn: InputFunction) -> ScheduledBatches:
        """Returns the batches that workers read."""
        batches = ScheduledBatches(input_fn, self._strategy)
        self._source = batches.source
        self._in_flight.clear()
        self._function = self._values = None
        return batches

    def run(self, step: ModelStep, batch: list[BatchAssignment]) -> Any:
        """Schedules a step and returns the values of the newest finished step."""
        if self._function is None:
            self._function = _WorkerStep(step)
        self._in_flight.append(
            [
                self._coordinator.schedule(
                    self._function, args=(self._source, assignment), worker=assignment.worker
                )
                for assignment in batch
            ]
        )
        most = _IN_FLIGHT_PER_WORKER * self.num_workers
        while self._values is None or len(self._in_flight) > most:
            self._values = self._newest()
        summary.scalar("loss", self._values["loss"])  # workers have no writer
        return self._values

    def finish(self) -> Any:
        """Waits for all steps and returns the values of the last one."""
        self._coordinator.strategy.executor.settle()
        while self._in_flight:
            self._values = self._newest()
        return self._values

    def _newest(self) -> Any:
        return [value.fetch() for value in self._in_flight.popleft()][-1]
