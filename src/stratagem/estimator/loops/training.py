"""Training loop of an Estimator."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import importlib.util
import itertools
import logging
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from stratagem.contexts import get_strategy
from stratagem.estimator.hooks.session_run_hook import SessionRunHook
from stratagem.estimator.hooks.timers import SecondOrStepTimer
from stratagem.estimator.loops.batches import InputFunction, features_and_labels, require_batch
from stratagem.estimator.loops.session import HookedLoop, ModelSession
from stratagem.estimator.loops.training_role import IndependentWorkerRole, TrainingRole
from stratagem.estimator.settings.run_config import RunConfig
from stratagem.estimator.spec import EstimatorSpec
from stratagem.estimator.steps.model_function import ModelFunction
from stratagem.estimator.steps.model_step import EvaluationStep, ModelStep, PredictionStep
from stratagem.estimator.steps.training_step import TrainingStep
from stratagem.estimator.steps.variable_store import ModelCheckpoints, VariableStore
from stratagem.execution import summary
from stratagem.input.placement import place
from stratagem.keras.training.dataset_creator import DatasetCreator
from stratagem.parameter_server.coordinator.cluster_coordinator import ClusterCoordinator
from stratagem.parameter_server.coordinator.remote_value import RemoteValue
from stratagem.parameter_server.keras.worker_data import BatchAssignment, WorkerData
from stratagem.strategies.base.strategy import Strategy
from stratagem.strategies.one_device import OneDeviceStrategy

if TYPE_CHECKING:
    from stratagem.estimator.loops.batches import ModelBatches
    from stratagem.parameter_server.keras.worker_data import WorkerBatches

# Summaries of training steps and evaluations.

_logger = logging.getLogger(__name__)


def writer_of(folder: str) -> summary.SummaryWriter:
    """Returns a folder's summary writer; it writes nothing if TensorBoard is not installed."""
    if importlib.util.find_spec("tensorboard") is None:
        _logger.warning(
            "Not writing summaries to %s: pip install 'stratagem[tensorboard]' first.", folder
        )
        return summary.create_noop_writer()
    return summary.create_file_writer(folder)


def write_results(folder: str, results: Mapping[str, Any], step: int) -> None:
    """Writes the scalar metrics of an evaluation."""
    writer = writer_of(folder)
    with writer.as_default(step=step):
        for name, value in results.items():
            if np.ndim(value) == 0:
                summary.scalar(name, value)
    writer.close()


class TrainingSummaries:
    """Records summaries every `save_steps` training steps; None or 0 for never."""

    def __init__(self, folder: str, save_steps: int | None) -> None:
        self.writer = writer_of(folder) if save_steps else summary.create_noop_writer()
        self._timer = SecondOrStepTimer(every_steps=save_steps) if save_steps else None
        self._records = True

    @contextlib.contextmanager
    def written(self) -> Generator[None]:
        """Makes the writer the default in the `with` block, and closes it afterwards."""
        try:
            with self.writer.as_default(), summary.record_if(lambda: self._records):
                yield
        finally:
            self.writer.close()

    @contextlib.contextmanager
    def of_step(self, step: int) -> Generator[None]:
        """Records the step's summaries inside the `with` block only if due."""
        is_due = self._timer is not None and self._timer.should_trigger_for_step(step)
        if self._timer is not None and is_due:
            self._timer.update_last_triggered_step(step)
            summary.experimental.set_step(step)
        self._records = is_due
        yield
        self._records = True


# Training that a coordinator schedules on the workers of a parameter-server cluster.

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


# Variables, steps and checkpoints of a model function under a strategy.


class DistributedModel:
    """Variables, steps and checkpoints of a model function under one strategy."""

    def __init__(
        self, function: ModelFunction, strategy: Strategy, model_dir: str, config: RunConfig
    ) -> None:
        self.strategy = strategy
        self.store = store = VariableStore(strategy)
        self.role = _training_role(strategy)
        self.checkpoints = ModelCheckpoints(store, model_dir, config)
        self.training = TrainingStep(function, store, strategy)
        self.evaluation = EvaluationStep(function, store, strategy)
        self.prediction = PredictionStep(function, store, strategy)


class DistributedModels:
    """Cache of distributed models by strategy."""

    def __init__(self, function: ModelFunction, model_dir: str, config: RunConfig) -> None:
        self._function = function
        self._model_dir = model_dir
        self._config = config
        self._models: dict[Strategy, DistributedModel] = {}
        self._one_device: Strategy | None = None

    def under(self, strategy: Strategy | None) -> DistributedModel:
        """Returns the model under a strategy; None means JAX's default device."""
        if strategy is None:
            strategy = self._on_default_device()
        if strategy not in self._models:
            self._models[strategy] = DistributedModel(
                self._function, strategy, self._model_dir, self._config
            )
        return self._models[strategy]

    @staticmethod
    def skip_training(strategy: Strategy | None) -> None:
        """Lets other tasks know that this training run has no steps, so they don't wait for it."""
        if strategy is not None:
            _training_role(strategy).skip()

    def _on_default_device(self) -> Strategy:
        if self._one_device is None:
            device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
            self._one_device = OneDeviceStrategy(device or jax.local_devices()[0])
        return self._one_device


def _training_role(strategy: Strategy) -> TrainingRole:
    if not strategy.placement.is_remote:
        return TrainingRole(strategy)
    if strategy.executor.schedules:
        return CoordinatorRole(strategy)
    return IndependentWorkerRole(strategy)


def train(
    model: DistributedModel,
    batches: ModelBatches | ScheduledBatches,
    config: RunConfig,
    *,
    initialize: Callable[[], bool],
    make_hooks: Callable[[EstimatorSpec], Sequence[SessionRunHook]],
    last_step: Callable[[int], int | None],
) -> None:
    """Trains until the data or the steps run out, or a hook requests a stop.

    `initialize` sets the variables and returns True if they come from a checkpoint. `last_step`
    maps the first global step to the last one, or None if unlimited.
    """
    folder = config.model_dir
    assert folder is not None
    summaries = TrainingSummaries(folder, config.save_summary_steps if model.role.saves else None)
    with contextlib.closing(batches), summaries.written():
        first = batches.first()
        model.role.wait(config.session_creation_timeout_secs)
        spec = model.training.prepare(first)
        session = ModelSession(
            model.training, spec, model.checkpoints, folder, summaries.writer, model.role
        )
        loop = HookedLoop(session, make_hooks(spec))
        loop.begin()
        resumes = model.role.begin(initialize)
        session.read_global_step()
        if spec.scaffold is not None and not resumes:
            spec.scaffold.init_fn(session)
        loop.create_session()
        end = last_step(session.global_step)
        # zip reads the batch last, so no batch is consumed without being trained on.
        for _, batch in zip(_steps_until(end, session), batches.after(first), strict=False):
            model.checkpoints.forget()
            with loop.step() as context:
                with summaries.of_step(session.global_step + 1):
                    values = model.role.run(model.training, batch)
                session.finish_step(values, num_trained=1)
            if context.stop_requested:
                break
        if (values := model.role.finish()) is not None:
            session.finish_step(values)
            session.read_global_step()
        loop.end()


def _steps_until(end: int | None, session: ModelSession) -> Iterator[None]:
    """Yields once per step before `end`; other workers may also count steps."""
    start = session.global_step
    for num_steps in itertools.count():
        if end is not None and max(session.global_step, start + num_steps) >= end:
            return
        yield
