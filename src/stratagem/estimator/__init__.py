"""Estimators: a model function, trained, evaluated and served under any strategy."""

from stratagem.estimator.distribute_config import DistributeConfig
from stratagem.estimator.hooks import (
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
)
from stratagem.estimator.mode_keys import ModeKeys
from stratagem.estimator.run_config import RunConfig
from stratagem.estimator.scaffold import Scaffold
from stratagem.estimator.spec import EstimatorSpec

__all__ = [
    "DistributeConfig",
    "EstimatorSpec",
    "ModeKeys",
    "RunConfig",
    "Scaffold",
    "SessionRunArgs",
    "SessionRunContext",
    "SessionRunHook",
    "SessionRunValues",
]
