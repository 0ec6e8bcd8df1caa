"""Compiled Keras models as Estimators."""

from stratagem.estimator.keras_models.keras_batches import (
    inputs_of,
    output_names,
    outputs_by_name,
    split_weights,
    targets_of,
)
from stratagem.estimator.keras_models.keras_model_function import KerasModelFunction
from stratagem.estimator.keras_models.model_to_estimator import model_to_estimator

__all__ = [
    "KerasModelFunction",
    "inputs_of",
    "model_to_estimator",
    "output_names",
    "outputs_by_name",
    "split_weights",
    "targets_of",
]
