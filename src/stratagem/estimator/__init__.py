"""Estimators: a model function, trained, evaluated and served under any strategy."""

from stratagem.estimator import export
from stratagem.estimator.distribute_config import DistributeConfig
from stratagem.estimator.estimator import Estimator
from stratagem.estimator.exported_model import ExportedModel, load_exported
from stratagem.estimator.global_step import get_global_step, get_or_create_global_step
from stratagem.estimator.hooks import (
    CheckpointSaverHook,
    CheckpointSaverListener,
    FeedFnHook,
    FinalOpsHook,
    GlobalStepWaiterHook,
    LoggingTensorHook,
    NanLossDuringTrainingError,
    NanTensorHook,
    ProfilerHook,
    SecondOrStepTimer,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    StopAtStepHook,
)
from stratagem.estimator.mode_keys import ModeKeys
from stratagem.estimator.named_values import identity
from stratagem.estimator.run_config import RunConfig
from stratagem.estimator.scaffold import Scaffold
from stratagem.estimator.spec import EstimatorSpec
from stratagem.estimator.train_op import Minimize, minimize
from stratagem.estimator.warm_start import WarmStartSettings

__all__ = [
    "CheckpointSaverHook",
    "CheckpointSaverListener",
    "DistributeConfig",
    "Estimator",
    "EstimatorSpec",
    "ExportedModel",
    "FeedFnHook",
    "FinalOpsHook",
    "GlobalStepWaiterHook",
    "LoggingTensorHook",
    "Minimize",
    "ModeKeys",
    "NanLossDuringTrainingError",
    "NanTensorHook",
    "ProfilerHook",
    "RunConfig",
    "Scaffold",
    "SecondOrStepTimer",
    "SessionRunArgs",
    "SessionRunContext",
    "SessionRunHook",
    "SessionRunValues",
    "StopAtStepHook",
    "WarmStartSettings",
    "export",
    "get_global_step",
    "get_or_create_global_step",
    "identity",
    "load_exported",
    "minimize",
]
