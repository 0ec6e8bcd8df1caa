"""Training and inference loops: roles of a process, sessions of hooks, summaries and records."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import importlib.util
import json
import logging
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import keras
import numpy as np

from stratagem.checkpoint.latest import is_first
from stratagem.contexts import get_strategy
from stratagem.errors import invalid
from stratagem.estimator.checks import check_instances
from stratagem.estimator.hooks import (
    LoggingTensorHook,
    SecondOrStepTimer,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
)
from stratagem.estimator.inputs import (
    InputFunction,
    ModelBatches,
    features_and_labels,
    require_batch,
)
from stratagem.estimator.run_config import RunConfig
from stratagem.estimator.saving_hooks import (
    CheckpointSaverHook,
    CheckpointSaverListener,
    StepCounterHook,
)
from stratagem.estimator.spec import EstimatorSpec, ModelFunction
from stratagem.estimator.steps import (
    EvaluationStep,
    ModelCheckpoints,
    ModelStep,
    PredictionStep,
    TrainingStep,
    VariableStore,
    latest_checkpoint,
    spec_hooks,
    tensors_of,
)
from stratagem.execution import summary
from stratagem.input.placement import place
from stratagem.keras.training.datasets import DatasetCreator, part_of
from stratagem.parameter_server.coordinator.cluster_coordinator import ClusterCoordinator
from stratagem.parameter_server.coordinator.remote_value import RemoteValue
from stratagem.parameter_server.keras.worker_data import BatchAssignment, WorkerData
from stratagem.strategies.strategy import Strategy

if TYPE_CHECKING:
    from stratagem.parameter_server.keras.worker_data import WorkerBatches


FILE_NAME = "eval_metrics.jsonl"


def write_eval_metrics(eval_dir: str | os.PathLike[str], metrics: Mapping[str, Any]) -> None:
    """Appends the scalar metrics of an evaluation to a folder's record."""
    folder = Path(eval_dir)
    folder.mkdir(parents=True, exist_ok=True)
    scalars = {
        name: np.asarray(value).item() for name, value in metrics.items() if np.ndim(value) == 0
    }
    # A single write of a whole line, so that a concurrent reader never sees its start missing.
    with open(folder / FILE_NAME, "ab", buffering=0) as file:
        file.write(json.dumps(scalars).encode() + b"\n")


def read_eval_metrics(eval_dir: str | os.PathLike[str]) -> dict[int, dict[str, Any]]:
    """Returns the metrics of a folder's evaluations.

    Args:
        eval_dir: the folder; see `Estimator.eval_dir`.

    Returns:
        A dict from global steps, in order, to dicts of metrics by name. A later evaluation of the
        same step wins. Empty if there is no record.

    Example:
        >>> sg.estimator.read_eval_metrics("no/such/folder")
        {}

    Source: tensorflow/estimator early_stopping.py, read_eval_metrics.
    """
    found: dict[int, dict[str, Any]] = {}
    try:
        lines = (Path(eval_dir) / FILE_NAME).read_bytes().split(b"\n")
    except FileNotFoundError:
        return {}
    for line in lines:
        try:
            metrics = json.loads(line)
        except ValueError:  # truncated when the writing process died
            continue
        found.setdefault(int(metrics["global_step"]), {}).update(metrics)
    return dict(sorted(found.items()))


# Training roles of a process: lockstep worker, independent worker.


class TrainingRole:
    """Role of a single process, or of processes in lockstep, which all do the same.

    `is_chief` is True if this process writes. `saves` is True if it takes part in saving
    checkpoints. `counts_all` is True if other processes also count steps.
    """

    saves = True
    counts_all = False

    def __init__(self, strategy: Strategy) -> None:
        topology = strategy.topology
        self._strategy = strategy
        self.is_chief = is_first()
        self.num_workers = topology.num_replicas // topology.num_local_replicas

    def wait(self, limit_s: float) -> None:
        """Waits until the chief creates the variables. Call before the model function."""

    def begin(self, initialize: Callable[[], bool]) -> bool:
        """Initializes the existing variables; returns True if they come from a checkpoint."""
        return initialize()

    def batches(self, input_fn: InputFunction) -> Any:
        """Returns the batches that this process trains on."""
        return ModelBatches(input_fn, self._strategy)

    def run(self, step: ModelStep, batch: Any) -> Any:
        """Runs a step and returns values for hooks."""
        return step.run(batch)

    def finish(self) -> Any:
        """Waits for remote steps; returns the last one's values, or None."""
        return None

    def skip(self) -> None:
        """Records that this run trains no steps."""


class IndependentWorkerRole(TrainingRole):
    """Role of a worker that runs the whole program, sharing parameter servers with others.

    Only the chief creates, initializes and saves variables; the others look them up.
    """

    counts_all = True

    def __init__(self, strategy: Strategy) -> None:
        super().__init__(strategy)
        worker, self.num_workers = strategy.executor.worker
        self.is_chief = self.saves = worker == 0
        self._cluster: Any = strategy.cluster
        self._number = 0

    def batches(self, input_fn: InputFunction) -> Any:
        """Returns the batches of this worker's data shard."""
        worker, num_workers = self._strategy.executor.worker
        are_in_sync = self._strategy.placement.remote.is_synchronous
        shard = part_of(DatasetCreator(input_fn), worker, num_workers, are_in_sync=are_in_sync)
        return ModelBatches(shard, self._strategy)

    def wait(self, limit_s: float) -> None:
        """Waits until the chief has started this training run."""
        self._number = self._cluster.next_training()
        if not self.is_chief:
            self._cluster.wait_for_begin(self._number, limit_s)

    def begin(self, initialize: Callable[[], bool]) -> bool:
        """Initializes variables on the chief, then releases the other workers."""
        if not self.is_chief:
            return True
        resumes = initialize()
        self._cluster.begin(self._number)
        return resumes

    def skip(self) -> None:
        """Records that this run trains no steps, and releases waiting workers."""
        number = self._cluster.next_training()
        if self.is_chief:
            self._cluster.begin(number)


# Hooks of a training run, in calling order.


def training_hooks(
    spec: EstimatorSpec,
    hooks: Sequence[SessionRunHook],
    config: RunConfig,
    saving_listeners: Sequence[CheckpointSaverListener] | None,
    role: TrainingRole,
) -> list[SessionRunHook]:
    """Returns this process's training hooks: checkpoint savers first, loggers last."""
    listeners = check_instances("saving_listeners", saving_listeners, CheckpointSaverListener)
    on_all = [*hooks, *(spec.training_hooks or ())]
    on_chief = list(spec.training_chief_hooks or ()) if role.is_chief else []
    every_steps = config.log_step_count_steps
    if every_steps is not None and role.is_chief:
        values = {"loss": "loss", "step": "global_step"}
        on_all.append(LoggingTensorHook(values, every_n_iter=every_steps))
        on_all.append(StepCounterHook(every_steps, output_dir=config.model_dir))
    savers = [hook for hook in (*on_all, *on_chief) if isinstance(hook, CheckpointSaverHook)]
    # 0 disables checkpoints, like None.
    when = config.save_checkpoints_secs or None, config.save_checkpoints_steps or None
    if not savers and role.saves and any(when):
        savers = [CheckpointSaverHook(config.model_dir or "", *when, scaffold=spec.scaffold)]
        on_chief = [*savers, *on_chief]
    if savers:
        savers[0].add_listeners(listeners)
    elif listeners and role.saves:
        raise ValueError(
            "saving_listeners are set, but the RunConfig disables checkpoints: set "
            "save_checkpoints_steps or save_checkpoints_secs."
        )
    return [*on_chief, *on_all]


# Loop and session of hooks: calls them around steps and fetches their values.

_Batch = TypeVar("_Batch")
_Values = TypeVar("_Values")


class Session:
    """Training, evaluation or prediction loop, as hooks see it.

    `global_step` counts the steps trained, including the last finished one. `summary_writer` writes
    to `model_dir`; it is None except on the chief.
    """

    def __init__(self, model: DistributedModel, step: ModelStep, writer: object = None) -> None:
        assert step.spec is not None
        self.mode, self.spec, self.model_dir = step.mode, step.spec, model.model_dir
        self._role = model.role if step is model.training else TrainingRole(model.strategy)
        self.is_chief = self._role.is_chief
        self.num_workers = self._role.num_workers
        self._step = step
        self._checkpoints = model.checkpoints
        self.summary_writer: Any = writer
        self.global_step = 0
        self._values: dict[str, Any] | None = None
        self.read_global_step()

    def read_global_step(self) -> None:
        """Reads the step variable after a restore; later steps are counted on the host."""
        self.global_step = int(self._step.store.global_step)

    def finish_step(self, values: dict[str, Any], *, num_trained: int = 0) -> None:
        """Stores the values of a finished step."""
        self._values = values
        if num_trained and self._role.counts_all:
            self.read_global_step()
        else:
            self.global_step += num_trained

    def save_checkpoint(self) -> str:
        """Saves all variables and returns the path. Call on every process."""
        if self._role.saves:
            return self._checkpoints.save()
        return latest_checkpoint(self.model_dir) or ""

    def run(self, fetches: object) -> Any:
        """Returns values of the last finished step, waiting for it if necessary."""
        return jax.tree.map(self._fetch, fetches)

    def _fetch(self, wanted: object) -> Any:
        store, values = self._step.store, self._values
        name = wanted.removesuffix(":0") if isinstance(wanted, str) else ""
        variable = store.find(name) if name else wanted
        if variable is store.global_step:
            return np.int32(self.global_step)
        if isinstance(variable, keras.Variable):
            return np.asarray(variable.value)
        if isinstance(wanted, np.ndarray | np.generic | int | float):
            return np.asarray(wanted)
        if values is None:
            raise ValueError(
                f"A hook fetched {wanted!r} before the first step: fetch it in before_run."
            )
        if self.spec.loss is not None and (name == "loss" or wanted is self.spec.loss):
            return self._on_host(values["loss"])
        if name in values["named"]:
            return self._on_host(values["named"][name])
        for index, hook in enumerate(spec_hooks(self.spec, self.mode)):
            for held, value in tensors_of(hook).items():
                if value is wanted and held in values["held"][index]:
                    return self._on_host(values["held"][index][held])
        names = sorted({"loss", *values["named"], *store.named})
        raise invalid(
            f"A hook fetched {wanted!r}, which the step does not return.",
            f"a variable, a value in the hook's own `tensors`, or one of {names}.",
            "name it in the model function: sg.estimator.identity(value, name=...).",
        )

    def _on_host(self, value: object) -> Any:
        return np.asarray(self._step.strategy.local_results(value)[0])


def hooked_steps(
    session: Session,
    hooks: Sequence[SessionRunHook],
    batches: Iterable[_Batch],
    step: Callable[[_Batch], _Values],
    initialize: Callable[[], bool],
    finish: Callable[[], object] = lambda: None,
) -> Iterator[_Values]:
    """Yields the values of each step, until the batches end or a hook requests a stop.

    `initialize` sets the variables, between the hooks' `begin` and `after_create_session`, and
    returns True if they come from a checkpoint. `step` runs a step, and tells the session. `finish`
    is called before the hooks' `end`, which a failed loop does not reach.
    """
    for hook in hooks:
        hook.begin()
    resumes = initialize()
    session.read_global_step()
    scaffold = session.spec.scaffold
    if scaffold is not None and not resumes:
        scaffold.init_fn(session)
        session.read_global_step()
    for hook in hooks:
        hook.after_create_session(session, None)
    for batch in batches:
        context = SessionRunContext(SessionRunArgs(None), session)
        wanted = [hook.before_run(context) for hook in hooks]
        values = step(batch)
        for hook, args in zip(hooks, wanted, strict=True):
            fetched = None if args is None else session.run(args.fetches)
            hook.after_run(context, SessionRunValues(fetched))
        yield values
        if context.stop_requested:
            break
    finish()
    for hook in hooks:
        hook.end(session)


# Summaries of training steps and evaluations.

_logger = logging.getLogger(__name__)


def writer_of(folder: str) -> summary.SummaryWriter:
    """Returns a folder's summary writer; it writes nothing if TensorBoard is not installed."""
    if importlib.util.find_spec("tensorboard") is None:
        _logger.warning(
            "Not writing summaries to %s: pip install 'stratagem[observe]' first.", folder
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
        self._saves = bool(save_steps)
        self._timer = SecondOrStepTimer(every_steps=save_steps or 1)
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
        self._records = self._saves and self._timer.should_trigger_for_step(step)
        if self._records:
            self._timer.update_last_triggered_step(step)
            summary.experimental.set_step(step)
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
        self.source: Any = self._assigner.source  # stands for a worker's batches

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
        self._function: _WorkerStep | None = None
        self._source: Any = None
        self._in_flight: collections.deque[list[RemoteValue]] = collections.deque()
        self._values: Any = None
        self._coordinator = ClusterCoordinator(strategy)
        self.num_workers = self._coordinator.num_workers

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
        self.strategy, self.model_dir = strategy, model_dir
        self.store = store = VariableStore(strategy)
        self.role = training_role(strategy)
        self.checkpoints = ModelCheckpoints(store, model_dir, config)
        self.training = TrainingStep(function, store, strategy)
        self.evaluation = EvaluationStep(function, store, strategy)
        self.prediction = PredictionStep(function, store, strategy)


def training_role(strategy: Strategy) -> TrainingRole:
    """Returns the role of this process under a strategy."""
    if not strategy.placement.is_remote:
        return TrainingRole(strategy)
    if strategy.executor.schedules:
        return CoordinatorRole(strategy)
    return IndependentWorkerRole(strategy)
