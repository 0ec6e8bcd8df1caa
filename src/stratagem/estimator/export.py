"""Names of `tf.estimator.export`: inputs and outputs of exported models."""

from stratagem.estimator.exporting.export_output import (
    ClassificationOutput,
    ExportOutput,
    PredictOutput,
    RegressionOutput,
)
from stratagem.estimator.exporting.serving import ServingInputReceiver
from stratagem.estimator.exporting.serving import (
    build_raw_serving_input_receiver_fn as build_raw_serving_input_receiver_fn,
)

__all__ = [
    "ClassificationOutput",
    "ExportOutput",
    "PredictOutput",
    "RegressionOutput",
    "ServingInputReceiver",
    "build_raw_serving_input_receiver_fn",
]
