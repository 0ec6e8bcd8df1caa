"""Public names: what type checkers see, and the table from which `__init__.py` loads them."""

from stratagem.estimator import experimental as experimental
from stratagem.estimator import export as export
from stratagem.estimator.estimator import Estimator as Estimator
from stratagem.estimator.estimator import WarmStartSettings as WarmStartSettings
from stratagem.estimator.estimator import add_metrics as add_metrics
from stratagem.estimator.experimental import make_early_stopping_hook as make_early_stopping_hook
from stratagem.estimator.experimental import stop_if_higher_hook as stop_if_higher_hook
from stratagem.estimator.experimental import stop_if_lower_hook as stop_if_lower_hook
from stratagem.estimator.experimental import stop_if_no_decrease_hook as stop_if_no_decrease_hook
from stratagem.estimator.experimental import stop_if_no_increase_hook as stop_if_no_increase_hook
from stratagem.estimator.export import ExportedModel as ExportedModel
from stratagem.estimator.export import load_exported as load_exported
from stratagem.estimator.hooks import FinalOpsHook as FinalOpsHook
from stratagem.estimator.hooks import GlobalStepWaiterHook as GlobalStepWaiterHook
from stratagem.estimator.hooks import LoggingTensorHook as LoggingTensorHook
from stratagem.estimator.hooks import NanLossDuringTrainingError as NanLossDuringTrainingError
from stratagem.estimator.hooks import NanTensorHook as NanTensorHook
from stratagem.estimator.hooks import SecondOrStepTimer as SecondOrStepTimer
from stratagem.estimator.hooks import SessionRunArgs as SessionRunArgs
from stratagem.estimator.hooks import SessionRunContext as SessionRunContext
from stratagem.estimator.hooks import SessionRunHook as SessionRunHook
from stratagem.estimator.hooks import SessionRunValues as SessionRunValues
from stratagem.estimator.hooks import StopAtStepHook as StopAtStepHook
from stratagem.estimator.inputs import numpy_input_fn as numpy_input_fn
from stratagem.estimator.inputs import pandas_input_fn as pandas_input_fn
from stratagem.estimator.keras_models import model_to_estimator as model_to_estimator
from stratagem.estimator.loops import read_eval_metrics as read_eval_metrics
from stratagem.estimator.premade.estimators import BaselineClassifier as BaselineClassifier
from stratagem.estimator.premade.estimators import BaselineEstimator as BaselineEstimator
from stratagem.estimator.premade.estimators import BaselineRegressor as BaselineRegressor
from stratagem.estimator.premade.estimators import DNNClassifier as DNNClassifier
from stratagem.estimator.premade.estimators import DNNEstimator as DNNEstimator
from stratagem.estimator.premade.estimators import (
    DNNLinearCombinedClassifier as DNNLinearCombinedClassifier,
)
from stratagem.estimator.premade.estimators import (
    DNNLinearCombinedEstimator as DNNLinearCombinedEstimator,
)
from stratagem.estimator.premade.estimators import (
    DNNLinearCombinedRegressor as DNNLinearCombinedRegressor,
)
from stratagem.estimator.premade.estimators import DNNRegressor as DNNRegressor
from stratagem.estimator.premade.estimators import LinearClassifier as LinearClassifier
from stratagem.estimator.premade.estimators import LinearEstimator as LinearEstimator
from stratagem.estimator.premade.estimators import LinearRegressor as LinearRegressor
from stratagem.estimator.premade.heads import BinaryClassHead as BinaryClassHead
from stratagem.estimator.premade.heads import Head as Head
from stratagem.estimator.premade.heads import LogisticRegressionHead as LogisticRegressionHead
from stratagem.estimator.premade.heads import MultiClassHead as MultiClassHead
from stratagem.estimator.premade.heads import PoissonRegressionHead as PoissonRegressionHead
from stratagem.estimator.premade.heads import RegressionHead as RegressionHead
from stratagem.estimator.run_config import DistributeConfig as DistributeConfig
from stratagem.estimator.run_config import RunConfig as RunConfig
from stratagem.estimator.saving_hooks import CheckpointSaverHook as CheckpointSaverHook
from stratagem.estimator.saving_hooks import CheckpointSaverListener as CheckpointSaverListener
from stratagem.estimator.saving_hooks import ProfilerHook as ProfilerHook
from stratagem.estimator.saving_hooks import StepCounterHook as StepCounterHook
from stratagem.estimator.saving_hooks import SummarySaverHook as SummarySaverHook
from stratagem.estimator.spec import EstimatorSpec as EstimatorSpec
from stratagem.estimator.spec import ModeKeys as ModeKeys
from stratagem.estimator.spec import Scaffold as Scaffold
from stratagem.estimator.spec import identity as identity
from stratagem.estimator.spec import minimize as minimize
from stratagem.estimator.tasks import BestExporter as BestExporter
from stratagem.estimator.tasks import EvalSpec as EvalSpec
from stratagem.estimator.tasks import Exporter as Exporter
from stratagem.estimator.tasks import FinalExporter as FinalExporter
from stratagem.estimator.tasks import LatestExporter as LatestExporter
from stratagem.estimator.tasks import TrainSpec as TrainSpec
from stratagem.estimator.tasks import train_and_evaluate as train_and_evaluate
from stratagem.estimator.train import get_global_step as get_global_step
from stratagem.estimator.train import get_or_create_global_step as get_or_create_global_step
