"""Variables, steps and checkpoints of a model function under a strategy."""

from __future__ import annotations

import jax

from stratagem.estimator.loops.coordinated_training import CoordinatorRole
from stratagem.estimator.loops.training_role import IndependentWorkerRole, TrainingRole
from stratagem.estimator.settings.run_config import RunConfig
from stratagem.estimator.steps.checkpoints import ModelCheckpoints
from stratagem.estimator.steps.evaluation import EvaluationStep
from stratagem.estimator.steps.model_function import ModelFunction
from stratagem.estimator.steps.prediction import PredictionStep
from stratagem.estimator.steps.training_step import TrainingStep
from stratagem.estimator.steps.variable_store import VariableStore
from stratagem.messages import explain
from stratagem.strategies.base.strategy import Strategy
from stratagem.strategies.one_device import OneDeviceStrategy


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
    if strategy.placement.remote.local is not None:
        raise NotImplementedError(
            explain(
                f"An Estimator was trained under {strategy} with local_updates.",
                expected="a strategy whose workers share the global step in each step: hooks, "
                "max_steps and checkpoints count by it.",
                fix="omit local_updates, or train a Keras model with fit.",
            )
        )
    if strategy.executor.schedules:
        return CoordinatorRole(strategy)
    return IndependentWorkerRole(strategy)
