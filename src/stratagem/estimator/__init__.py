"""Estimators: training, evaluation and export of a model function under any strategy."""

from stratagem.estimator import experimental, export
from stratagem.estimator.estimator import Estimator, WarmStartSettings, add_metrics
from stratagem.estimator.experimental import (
    make_early_stopping_hook,
    stop_if_higher_hook,
    stop_if_lower_hook,
    stop_if_no_decrease_hook,
    stop_if_no_increase_hook,
)
from stratagem.estimator.export import ExportedModel, load_exported
from stratagem.estimator.exporters import BestExporter, Exporter, FinalExporter, LatestExporter
from stratagem.estimator.hooks import (
    FinalOpsHook,
    GlobalStepWaiterHook,
    LoggingTensorHook,
    NanLossDuringTrainingError,
    NanTensorHook,
    SecondOrStepTimer,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    StopAtStepHook,
)
from stratagem.estimator.inputs import numpy_input_fn, pandas_input_fn
from stratagem.estimator.keras_models import model_to_estimator
from stratagem.estimator.loops import read_eval_metrics
from stratagem.estimator.premade.class_heads import BinaryClassHead, MultiClassHead
from stratagem.estimator.premade.estimators import (
    BaselineClassifier,
    BaselineEstimator,
    BaselineRegressor,
    DNNClassifier,
    DNNEstimator,
    DNNLinearCombinedClassifier,
    DNNLinearCombinedEstimator,
    DNNLinearCombinedRegressor,
    DNNRegressor,
    LinearClassifier,
    LinearEstimator,
    LinearRegressor,
)
from stratagem.estimator.premade.heads import (
    Head,
    LogisticRegressionHead,
    PoissonRegressionHead,
    RegressionHead,
)
from stratagem.estimator.run_config import DistributeConfig, RunConfig
from stratagem.estimator.saving_hooks import (
    CheckpointSaverHook,
    CheckpointSaverListener,
    ProfilerHook,
    StepCounterHook,
    SummarySaverHook,
)
from stratagem.estimator.spec import EstimatorSpec, Minimize, ModeKeys, Scaffold, identity, minimize
from stratagem.estimator.tasks import EvalSpec, TrainSpec, train_and_evaluate
from stratagem.estimator.train import get_global_step, get_or_create_global_step

__all__ = [
    "BaselineClassifier",
    "BaselineEstimator",
    "BaselineRegressor",
    "BestExporter",
    "BinaryClassHead",
    "CheckpointSaverHook",
    "CheckpointSaverListener",
    "DNNClassifier",
    "DNNEstimator",
    "DNNLinearCombinedClassifier",
    "DNNLinearCombinedEstimator",
    "DNNLinearCombinedRegressor",
    "DNNRegressor",
    "DistributeConfig",
    "Estimator",
    "EstimatorSpec",
    "EvalSpec",
    "ExportedModel",
    "Exporter",
    "FinalExporter",
    "FinalOpsHook",
    "GlobalStepWaiterHook",
    "Head",
    "LatestExporter",
    "LinearClassifier",
    "LinearEstimator",
    "LinearRegressor",
    "LoggingTensorHook",
    "LogisticRegressionHead",
    "Minimize",
    "ModeKeys",
    "MultiClassHead",
    "NanLossDuringTrainingError",
    "NanTensorHook",
    "PoissonRegressionHead",
    "ProfilerHook",
    "RegressionHead",
    "RunConfig",
    "Scaffold",
    "SecondOrStepTimer",
    "SessionRunArgs",
    "SessionRunContext",
    "SessionRunHook",
    "SessionRunValues",
    "StepCounterHook",
    "StopAtStepHook",
    "SummarySaverHook",
    "TrainSpec",
    "WarmStartSettings",
    "add_metrics",
    "experimental",
    "export",
    "get_global_step",
    "get_or_create_global_step",
    "identity",
    "load_exported",
    "make_early_stopping_hook",
    "minimize",
    "model_to_estimator",
    "numpy_input_fn",
    "pandas_input_fn",
    "read_eval_metrics",
    "stop_if_higher_hook",
    "stop_if_lower_hook",
    "stop_if_no_decrease_hook",
    "stop_if_no_increase_hook",
    "train_and_evaluate",
]
