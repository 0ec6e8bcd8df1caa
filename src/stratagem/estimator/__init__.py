"""Estimators: training, evaluation and export of a model function under any strategy."""

from stratagem.estimator import experimental, export
from stratagem.estimator.add_metrics import add_metrics
from stratagem.estimator.estimator import Estimator, WarmStartSettings
from stratagem.estimator.exporting.export_programs import ExportedModel, load_exported
from stratagem.estimator.global_step import get_global_step, get_or_create_global_step
from stratagem.estimator.heads.classification import BinaryClassHead, MultiClassHead
from stratagem.estimator.heads.head import Head
from stratagem.estimator.heads.regression import (
    LogisticRegressionHead,
    PoissonRegressionHead,
    RegressionHead,
)
from stratagem.estimator.hooks.checkpoint_saver import CheckpointSaverHook, CheckpointSaverListener
from stratagem.estimator.hooks.final_ops import FeedFnHook, FinalOpsHook
from stratagem.estimator.hooks.nan import NanLossDuringTrainingError, NanTensorHook
from stratagem.estimator.hooks.profiler import ProfilerHook
from stratagem.estimator.hooks.session_run_hook import (
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    StopAtStepHook,
)
from stratagem.estimator.hooks.step_counter import StepCounterHook, SummarySaverHook
from stratagem.estimator.hooks.timers import (
    GlobalStepWaiterHook,
    LoggingTensorHook,
    SecondOrStepTimer,
)
from stratagem.estimator.inputs import numpy_input_fn, pandas_input_fn
from stratagem.estimator.keras_models.model_to_estimator import model_to_estimator
from stratagem.estimator.loops.evaluation_record import read_eval_metrics
from stratagem.estimator.mode_keys import ModeKeys
from stratagem.estimator.named_values import identity
from stratagem.estimator.premade.baseline import (
    BaselineClassifier,
    BaselineEstimator,
    BaselineRegressor,
)
from stratagem.estimator.premade.dnn import DNNClassifier, DNNEstimator, DNNRegressor
from stratagem.estimator.premade.dnn_linear_combined import (
    DNNLinearCombinedClassifier,
    DNNLinearCombinedEstimator,
    DNNLinearCombinedRegressor,
)
from stratagem.estimator.premade.linear import LinearClassifier, LinearEstimator, LinearRegressor
from stratagem.estimator.settings.run_config import DistributeConfig, RunConfig
from stratagem.estimator.spec import EstimatorSpec, Minimize, Scaffold, minimize
from stratagem.estimator.tasks.early_stopping import (
    make_early_stopping_hook,
    stop_if_higher_hook,
    stop_if_lower_hook,
    stop_if_no_decrease_hook,
    stop_if_no_increase_hook,
)
from stratagem.estimator.tasks.train_and_evaluate import train_and_evaluate
from stratagem.estimator.tasks.train_spec import (
    BestExporter,
    EvalSpec,
    Exporter,
    FinalExporter,
    LatestExporter,
    TrainSpec,
)

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
    "FeedFnHook",
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
