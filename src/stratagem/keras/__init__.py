"""Keras integration: callbacks, losses and variables, and the one place that patches Keras."""

from stratagem.keras.seam import install

from stratagem.keras.callbacks.backup_and_restore import BackupAndRestore  # isort: skip
from stratagem.keras.callbacks.profile import profile  # isort: skip
from stratagem.keras.training.dataset_creator import DatasetCreator  # isort: skip
from stratagem.keras.numerics.losses import compute_average_loss

from stratagem.keras.numerics.losses import scale_regularization_loss  # isort: skip
from stratagem.keras.training.generate_stream import generate_stream  # isort: skip
from stratagem.keras.training.model import lower_training_step  # isort: skip
from stratagem.keras.training.model import compile

from stratagem.keras.training.model import strategy_of  # isort: skip
from stratagem.keras.numerics.optimizer import apply_gradients  # isort: skip
from stratagem.keras.numerics.random_state import RandomState  # isort: skip
from stratagem.keras.numerics.chunked_crossentropy import ChunkedSparseCategoricalCrossentropy  # isort: skip
from stratagem.keras.numerics.chunked_loss import chunked_softmax_cross_entropy  # isort: skip
from stratagem.keras.numerics.remat import remat  # isort: skip
from stratagem.keras.numerics.layer_chains import scan_layers  # isort: skip
from stratagem.keras.evaluation.sidecar_evaluator import SidecarEvaluation

from stratagem.keras.evaluation.sidecar_evaluator import SidecarEvaluator  # isort: skip
from stratagem.keras.evaluation.sidecar_evaluator import SidecarEvaluatorModelExport  # isort: skip
from stratagem.keras.callbacks.tensorboard import TensorBoard  # isort: skip
from stratagem.keras.variables.variable import DistributedVariable  # isort: skip
from stratagem.keras.variables.variable_creation import Variable  # isort: skip

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
