"""Keras integration: callbacks, losses and variables, and the one place that patches Keras."""

from stratagem.keras.seam import install

from stratagem.keras.backup_and_restore import BackupAndRestore  # isort: skip
from stratagem.keras.dataset_creator import DatasetCreator  # isort: skip
from stratagem.keras.losses import compute_average_loss, scale_regularization_loss  # isort: skip
from stratagem.keras.lowering import lower_training_step  # isort: skip
from stratagem.keras.model import compile, strategy_of  # isort: skip
from stratagem.keras.optimizer import apply_gradients  # isort: skip
from stratagem.keras.random_state import RandomState  # isort: skip
from stratagem.keras.sidecar_evaluator import SidecarEvaluation, SidecarEvaluator  # isort: skip
from stratagem.keras.sidecar_export import SidecarEvaluatorModelExport  # isort: skip
from stratagem.keras.tensorboard import TensorBoard  # isort: skip
from stratagem.keras.variable import DistributedVariable  # isort: skip
from stratagem.keras.variable_creation import Variable  # isort: skip

__all__ = [
    "BackupAndRestore",
    "DatasetCreator",
    "DistributedVariable",
    "RandomState",
    "SidecarEvaluation",
    "SidecarEvaluator",
    "SidecarEvaluatorModelExport",
    "TensorBoard",
    "Variable",
    "apply_gradients",
    "compile",
    "compute_average_loss",
    "lower_training_step",
    "scale_regularization_loss",
    "strategy_of",
]

install()
