"""A model function under one strategy: its variables, its steps and their checkpoint."""

from __future__ import annotations

import jax

from stratagem.estimator.loops.coordinated_training import Coordinated
from stratagem.estimator.loops.training_part import OwnProgram, TrainingPart
from stratagem.estimator.settings.run_config import RunConfig
from stratagem.estimator.steps.checkpoints import ModelCheckpoints
from stratagem.estimator.steps.evaluation import EvaluationStep
from stratagem.estimator.steps.model_function import ModelFunction
from stratagem.estimator.steps.prediction import PredictionStep
from stratagem.estimator.steps.training_step import TrainingStep
from stratagem.estimator.steps.variable_store import VariableStore
from stratagem.strategies import OneDeviceStrategy
from stratagem.strategies.strategy import Strategy

__all__ = ["PlacedModel", "PlacedModels"]


class PlacedModel:
    """The variables of a model function under one strategy, and its steps.

    Args:
        function: the model function.
        strategy: the strategy.
        model_dir: the folder of the checkpoints.
        config: the `RunConfig`.
    """

    def __init__(
        self, function: ModelFunction, strategy: Strategy, model_dir: str, config: RunConfig
    ) -> None:
        self.strategy = strategy
        store = VariableStore(strategy)
        self.store = store
        self.part = _part_of_training(strategy)
        self.checkpoints = ModelCheckpoints(store, model_dir, config)
        self.training = TrainingStep(function, store, strategy)
        self.evaluation = EvaluationStep(function, store, strategy)
        self.prediction = PredictionStep(function, store, strategy)


class PlacedModels:
    """A model function under each strategy that it is run with.

    Args:
        function: the model function.
        model_dir: the folder of the checkpoints.
        config: the `RunConfig`.
    """

    def __init__(self, function: ModelFunction, model_dir: str, config: RunConfig) -> None:
        self._function = function
        self._model_dir = model_dir
        self._config = config
        self._models: dict[Strategy, PlacedModel] = {}
        self._one_device: Strategy | None = None

    def under(self, strategy: Strategy | None) -> PlacedModel:
        """Returns the model under a strategy.

        Args:
            strategy: the strategy; None for JAX's default device.
        """
        if strategy is None:
            strategy = self._on_default_device()
        if strategy not in self._models:
            self._models[strategy] = PlacedModel(
                self._function, strategy, self._model_dir, self._config
            )
        return self._models[strategy]

    @staticmethod
    def skip_training(strategy: Strategy | None) -> None:
        """Notes that a training has nothing to do, for those that would wait for it.

        Args:
            strategy: of the training.
        """
        if strategy is not None:
            _part_of_training(strategy).skip()

    def _on_default_device(self) -> Strategy:
        if self._one_device is None:
            device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
            self._one_device = OneDeviceStrategy(device or jax.local_devices()[0])
        return self._one_device


def _part_of_training(strategy: Strategy) -> TrainingPart:
    if not strategy.placement.is_remote:
        return TrainingPart(strategy)
    return Coordinated(strategy) if strategy.executor.schedules else OwnProgram(strategy)
