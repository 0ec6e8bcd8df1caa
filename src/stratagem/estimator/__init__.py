"""Estimators: a model function, trained, evaluated and served under any strategy."""

from stratagem.estimator.distribute_config import DistributeConfig
from stratagem.estimator.estimator import Estimator
from stratagem.estimator.global_step import get_global_step, get_or_create_global_step
from stratagem.estimator.hooks import (
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
)
from stratagem.estimator.mode_keys import ModeKeys
from stratagem.estimator.named_values import identity
from stratagem.estimator.run_config import RunConfig
from stratagem.estimator.scaffold import Scaffold
from stratagem.estimator.spec import EstimatorSpec
from stratagem.estimator.train_op import Minimize, minimize

__all__ = [
    "DistributeConfig",
    "Estimator",
    "EstimatorSpec",
    "Minimize",
    "ModeKeys",
    "RunConfig",
    "Scaffold",
    "SessionRunArgs",
    "SessionRunContext",
    "SessionRunHook",
    "SessionRunValues",
    "get_global_step",
    "get_or_create_global_step",
    "identity",
    "minimize",
]
