"""Keras integration: callbacks, losses and variables, and the one place that patches Keras."""

# ruff: noqa: E402
from stratagem import environment

# Both first: on another backend the rest would fail with misleading errors.
environment.require_jax_choice()

import keras

environment.require_jax_backend(keras.config.backend())

from stratagem.keras.callbacks.backup_and_restore import BackupAndRestore
from stratagem.keras.callbacks.sidecar_evaluator import (
    SidecarEvaluation,
    SidecarEvaluator,
    SidecarEvaluatorModelExport,
)
from stratagem.keras.callbacks.tensorboard import TensorBoard, profile
from stratagem.keras.numerics.chunked_loss import (
    ChunkedSparseCategoricalCrossentropy,
    chunked_softmax_cross_entropy,
)
from stratagem.keras.numerics.losses import compute_average_loss, scale_regularization_loss
from stratagem.keras.numerics.optimizer import apply_gradients
from stratagem.keras.numerics.random_state import RandomState
from stratagem.keras.numerics.rematerialization import remat
from stratagem.keras.numerics.scanned_layers import scan_layers
from stratagem.keras.seam import install
from stratagem.keras.training.datasets import DatasetCreator
from stratagem.keras.training.generate_stream import generate_stream
from stratagem.keras.training.model import compile, lower_training_step, strategy_of
from stratagem.keras.variables.creation import Variable
from stratagem.keras.variables.variable import DistributedVariable

__all__ = [
    "BackupAndRestore",
    "ChunkedSparseCategoricalCrossentropy",
    "DatasetCreator",
    "DistributedVariable",
    "RandomState",
    "SidecarEvaluation",
    "SidecarEvaluator",
    "SidecarEvaluatorModelExport",
    "TensorBoard",
    "Variable",
    "apply_gradients",
    "chunked_softmax_cross_entropy",
    "compile",
    "compute_average_loss",
    "generate_stream",
    "lower_training_step",
    "profile",
    "remat",
    "scale_regularization_loss",
    "scan_layers",
    "strategy_of",
]

install()
