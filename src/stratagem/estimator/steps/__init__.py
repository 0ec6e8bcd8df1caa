"""A model function as compiled steps of training, evaluation and prediction."""

from stratagem.estimator.steps.checkpoints import (
    CHECKPOINT_NAME,
    ModelCheckpoints,
    latest_checkpoint,
    read_names,
    read_variable,
)
from stratagem.estimator.steps.evaluation import EvaluationStep
from stratagem.estimator.steps.model_function import ModelFunction, arguments_of
from stratagem.estimator.steps.model_step import ModelStep, hooks_of, reported
from stratagem.estimator.steps.prediction import PredictionStep, batches_of, check_keys, examples_of
from stratagem.estimator.steps.training_step import TrainingStep
from stratagem.estimator.steps.variable_store import GLOBAL_STEP, VariableStore, current_store

__all__ = [
    "CHECKPOINT_NAME",
    "EvaluationStep",
    "GLOBAL_STEP",
    "ModelCheckpoints",
    "ModelFunction",
    "ModelStep",
    "PredictionStep",
    "TrainingStep",
    "VariableStore",
    "arguments_of",
    "batches_of",
    "check_keys",
    "current_store",
    "examples_of",
    "hooks_of",
    "latest_checkpoint",
    "read_names",
    "read_variable",
    "reported",
]
