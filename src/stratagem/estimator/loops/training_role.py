"""Training roles of a process: lockstep worker, independent worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from stratagem.checkpoint.latest import is_first
from stratagem.errors import explain
from stratagem.estimator.hooks.checkpoint_saver import CheckpointSaverHook, CheckpointSaverListener
from stratagem.estimator.hooks.session_run_hook import SessionRunHook
from stratagem.estimator.hooks.step_counter import StepCounterHook
from stratagem.estimator.hooks.timers import LoggingTensorHook
from stratagem.estimator.loops.batches import InputFunction, ModelBatches
from stratagem.estimator.settings.run_config import RunConfig
from stratagem.estimator.spec import EstimatorSpec, check_instances
from stratagem.estimator.steps.model_step import ModelStep
from stratagem.keras.training.dataset_creator import DatasetCreator, part_of

if TYPE_CHECKING:
    from stratagem.strategies.base.strategy import Strategy


class TrainingRole:
    """Role of a single process, or of processes in lockstep, which all do the same.

    `is_chief` is True if this process writes. `saves` is True if it takes part in saving
    checkpoints. `counts_all` is True if other processes also count steps.
    """

    saves = True
    counts_all = False

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self.is_chief = is_first()

    @property
    def num_workers(self) -> int:
        """Number of processes that train."""
        topology = self._strategy.topology
        return topology.num_replicas // topology.num_local_replicas

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
        worker, self._num_workers = strategy.executor.worker
        self.is_chief = self.saves = worker == 0
        self._cluster: Any = strategy.cluster
        self._number = 0

    @property
    def num_workers(self) -> int:
        """Number of processes that train."""
        return self._num_workers

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
    is_chief = role.is_chief
    on_all = [*hooks, *(spec.training_hooks or ())]
    on_chief = list(spec.training_chief_hooks or ()) if is_chief else []
    every_steps = config.log_step_count_steps
    if every_steps is not None and is_chief:
        values = {"loss": "loss", "step": "global_step"}
        on_all.append(LoggingTensorHook(values, every_n_iter=every_steps))
        on_all.append(StepCounterHook(every_steps, output_dir=config.model_dir))
    savers = [hook for hook in (*on_all, *on_chief) if isinstance(hook, CheckpointSaverHook)]
    if savers and listeners:
        savers[0].add_listeners(listeners)
    if not savers and role.saves:
        savers = _savers(spec, config, listeners)
        return [*savers, *on_chief, *on_all]
    return [*on_chief, *on_all]


def _savers(
    spec: EstimatorSpec,
    config: RunConfig,
    listeners: Sequence[CheckpointSaverListener],
) -> list[SessionRunHook]:
    """Returns the checkpoint savers; each process saves its shards."""
    # 0 disables checkpoints, like None.
    secs = config.save_checkpoints_secs or None
    steps = config.save_checkpoints_steps or None
    if secs is not None or steps is not None:
        assert config.model_dir is not None
        return [
            CheckpointSaverHook(
                config.model_dir,
                save_secs=secs,
                save_steps=steps,
                scaffold=spec.scaffold,
                listeners=listeners,
            )
        ]
    if listeners:
        raise ValueError(
            explain(
                "saving_listeners are set, but the RunConfig disables checkpoints.",
                expected="save_checkpoints_steps or save_checkpoints_secs in the RunConfig.",
                fix="set one of the two, or remove saving_listeners.",
            )
        )
    return []
